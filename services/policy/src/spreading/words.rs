//! What people read about the range of an execution.

use fiec_schemas::ExecutionId;

use super::Ranges;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::cluster::Stage;

impl Ranges {
    /// For people: the part that an execution waits for, or because of which it fails.
    pub fn parts_in_words(&self, life: &Lifecycle, id: ExecutionId) -> Option<String> {
        if let Some((_, reason)) = self.failing.get(&id) {
            return Some(format!("it fails, since {reason}"));
        }
        if let Some(orphan) = self.orphans.get(&id) {
            return Some(format!("it is being cancelled by {}", orphan.who));
        }
        let part = self.awaited_by(id)?;
        Some(format!(
            "its own range is done. It waits for its part {} (tiles {} to {}) to end, and takes the \
             result back. That part is {}",
            part.id,
            part.from,
            part.to,
            self.stands_in_words(life, part.id)
        ))
    }

    /// For people: what would let it resume, if it waits for a part.
    pub fn help_for_parts(&self, id: ExecutionId) -> Option<String> {
        let part = self.awaited_by(id)?.id;
        Some(format!("the end of its part: `fiec why {part}`"))
    }

    /// For people: its holder, its parts, and why it is not spread further.
    pub fn in_words(&self, life: &Lifecycle, id: ExecutionId) -> String {
        let Some(member) = self.members.get(&id) else {
            return String::new();
        };
        let mut words = String::new();
        if let Some(holder) = member.spreading.part_of {
            words += &format!("; it is a part of {holder}");
        }
        for part in &member.spreading.parts {
            let stands = match self.ended.get(&part.id) {
                Some(fate) => fate.in_words().to_owned(),
                None => self.stands_in_words(life, part.id),
            };
            let (from, to, part) = (part.from, part.to, part.id);
            words += &format!("; its part {part} has tiles {from} to {to} and is {stands}");
        }
        let root = self.root_of(id);
        let (live, unborn) = self.those_of(root);
        let count = live.len() + unborn.len();
        words += &format!("; {count} of up to {} compute", member.spreading.up_to);
        if root != id {
            words += &format!(" {root} as a whole");
        }
        let stays = self.growth.get(&root).and_then(|g| g.stays.as_ref());
        if let Some(stays) = stays {
            words += &format!(", and no more, since {}", stays.in_words());
        }
        words
    }

    fn stands_in_words(&self, life: &Lifecycle, id: ExecutionId) -> String {
        let Some(e) = life.cluster().execution(id) else {
            return "being made".to_owned();
        };
        let on = |ix| &life.cluster().node(ix).id;
        match e.stage {
            Stage::Pending if self.awaited_by(id).is_some() => {
                "waiting for a part of its own".to_owned()
            }
            Stage::Pending => "waiting for a place".to_owned(),
            Stage::Bound(ix, _) => format!("bound to {}", on(ix)),
            Stage::Started(ix, _) => format!("computing on {}", on(ix)),
            Stage::Paused => "paused".to_owned(),
            Stage::Held => "held after a failure".to_owned(),
            Stage::Verifying => "verifying".to_owned(),
        }
    }
}
