//! Groups recorded executions: the parts of a range with their root, and the members of a gang.

use std::collections::BTreeMap;

use fiec_schemas::scheduling::Gang;
use fiec_schemas::{BatchName, ExecutionId, Tenant};

use super::ExecutionRow;

/// An execution with all its parts.
#[derive(Debug, Clone)]
pub(super) struct Whole<'a> {
    /// Its row.
    pub row: &'a ExecutionRow,
    /// Computing time, in microseconds.
    pub computed_us: u64,
    /// Capsules.
    pub capsules: u64,
}

/// The executions that are no parts, and the parts of unknown ones, in the order of the rows.
pub(super) fn wholes(rows: &[ExecutionRow]) -> Vec<Whole<'_>> {
    let places: BTreeMap<ExecutionId, usize> = rows
        .iter()
        .filter(|row| row.part_of.is_none())
        .map(|row| row.execution)
        .zip(0..)
        .collect();
    let mut wholes: Vec<Whole<'_>> = Vec::with_capacity(places.len());
    let mut parts = Vec::new();
    for row in rows.iter().filter(|row| row.part_of.is_none()) {
        wholes.push(Whole {
            row,
            computed_us: row.computed_us,
            capsules: row.capsules,
        });
    }
    for row in rows {
        let Some(of) = row.part_of else { continue };
        match places.get(&of).and_then(|at| wholes.get_mut(*at)) {
            Some(whole) => {
                whole.computed_us = whole.computed_us.saturating_add(row.computed_us);
                whole.capsules = whole.capsules.saturating_add(row.capsules);
            }
            None => parts.push(Whole {
                row,
                computed_us: row.computed_us,
                capsules: row.capsules,
            }),
        }
    }
    wholes.extend(parts);
    wholes
}

/// The gang of each execution that was in one, by its number. In order of arrival, as many
/// executions as the gang's size form one gang. Each gets a unique name, because a client may reuse
/// one. A single member is no gang.
pub(super) fn gangs(wholes: &[Whole<'_>]) -> BTreeMap<usize, Gang> {
    let mut sets: BTreeMap<(&Tenant, &BatchName), Vec<Vec<usize>>> = BTreeMap::new();
    let mut order: Vec<usize> = (0..wholes.len()).collect();
    order.sort_by_key(|number| {
        let row = wholes[*number].row;
        (row.submitted_at, row.execution)
    });
    for number in order {
        let row = wholes[number].row;
        let Some(gang) = row.spec.as_ref().and_then(|spec| spec.gang.as_ref()) else {
            continue;
        };
        let sets = sets.entry((&row.tenant, &gang.name)).or_default();
        match sets.last_mut().filter(|set| set.len() < gang.size as usize) {
            Some(set) => set.push(number),
            None => sets.push(vec![number]),
        }
    }
    let mut gangs = BTreeMap::new();
    for set in sets.into_values().flatten().filter(|set| set.len() > 1) {
        let size = u32::try_from(set.len()).unwrap_or(u32::MAX);
        let name = BatchName::new(format!("gang-of-{}", set[0]));
        if let Ok(name) = name {
            let gang = Gang { name, size };
            gangs.extend(set.into_iter().map(|number| (number, gang.clone())));
        }
    }
    gangs
}
