//! How a child handles orders, at a boundary and between two runs of its loop.

use std::time::Duration;

use fiec_schemas::BoundaryIndex;
use fiec_schemas::package::Grant;

use super::{Child, End, Running};
use crate::frames::{self, FrameError, Order, Reason, Report};
use crate::program::Capsule;
use crate::programs::{Instance, RunEnd};

/// Orders that the next boundary carries out.
#[derive(Default)]
pub(super) struct Orders {
    /// The reason of the next boundary report, if an order gives one: `Yield` or `Park`.
    pub(super) reason: Option<Reason>,
    pub(super) cancel: bool,
    /// Cause of the yield or park, for programs that accept one.
    pub(super) cause: Option<String>,
    /// A yield that is not due before this boundary.
    pub(super) later: Option<(BoundaryIndex, Option<String>)>,
    pub(super) grant: Option<Grant>,
    /// The time that it may still compute, if that is little.
    pub(super) limit: Option<Duration>,
    /// The grant while parked, if it is to change.
    pub(super) aside: Option<Grant>,
    /// Give away the last half of the remaining tiles.
    pub(super) split: bool,
    /// Continue from the park.
    pub(super) go_on: bool,
}

impl Child {
    /// Waits at a boundary that was just committed, with the grant for a parked run. Returns false
    /// if the run has ended here.
    pub(super) fn stand(
        &mut self,
        running: &mut Running<'_>,
        instance: &mut dyn Instance,
    ) -> Result<bool, End> {
        self.brief = false;
        running.orders.reason = None;
        let aside = running.orders.aside.take();
        if let Some(grant) = &aside {
            instance.configure(grant)?;
        }
        self.writer.report(&Report::Aside, &[])?;
        let ended = |orders: &Orders| orders.cancel || orders.reason.is_some();
        // One order at a time: orders after `unpark` belong to the capsules after it.
        while !running.orders.go_on && !ended(&running.orders) {
            self.take_order(running)?;
            if running.orders.reason == Some(Reason::Park) {
                // The run is parked already.
                running.orders.reason = None;
            }
        }
        running.empty_at = self.now();
        running.orders.go_on = false;
        if ended(&running.orders) {
            instance.end_run(match running.orders.cause.as_deref() {
                Some(cause) => RunEnd::Yield { cause },
                None => RunEnd::Cancel,
            });
            return Ok(false);
        }
        if let Some(grant) = running.orders.grant.take() {
            instance.configure(&grant)?;
        }
        running.mark = self.now();
        Ok(true)
    }

    /// Gives away the last half of the remaining tiles with this boundary, if the run continues.
    pub(super) fn split(
        &mut self,
        running: &mut Running<'_>,
        instance: &mut dyn Instance,
        cx: &Capsule,
    ) -> Result<(), End> {
        if running.orders.reason.is_none() && !running.orders.cancel {
            running.split = instance.split(cx)?;
        }
        match (&mut running.shares, running.split) {
            (Some(shares), Some(_)) => shares.parts += 1,
            _ => self.writer.report(&Report::Whole, &[])?,
        }
        Ok(())
    }

    /// Takes the orders that have arrived.
    pub(super) fn look(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        while self.port.has_order(Duration::ZERO)? {
            self.take_order(running)?;
        }
        running.empty_at = self.now();
        Ok(())
    }

    pub(super) fn wait(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        if !self.port.has_order(Duration::ZERO)? {
            self.port.has_order(Duration::from_secs(3600))?;
            running.empty_at = self.now();
        }
        self.look(running)
    }

    /// Waits because no commit was acknowledged for a lease: until one is, or for a yield, park or
    /// cancel.
    pub(super) fn park(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        eprintln!(
            "fiec: boundary not acknowledged within {} ms; {} waits at a boundary",
            running.lease.as_millis(),
            running.run.execution
        );
        while !running.sent.is_empty() && !running.orders.cancel && running.orders.reason.is_none()
        {
            self.wait(running)?;
        }
        Ok(())
    }

    pub(super) fn take_order(&mut self, running: &mut Running<'_>) -> Result<(), FrameError> {
        let Some((order, body)) = self.port.take()? else {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
        };
        match order {
            Order::Yield(frames::Yield {
                at: Some(at),
                cause,
                ..
            }) => running.orders.later = Some((at, cause)),
            Order::Yield(order) => {
                running.orders.cause = order.cause;
                running.orders.reason = Some(Reason::Yield);
            }
            // A yield takes precedence, and so does an earlier park.
            Order::Park(_) if running.orders.reason.is_some() => {}
            Order::Park(park) => {
                running.orders.cause = park.cause;
                running.orders.aside = park.grant;
                running.orders.reason = Some(Reason::Park);
                running.orders.go_on = false;
            }
            Order::Unpark { grant } => {
                running.orders.go_on = true;
                if grant.is_some() {
                    running.orders.grant = grant;
                }
                if running.orders.reason == Some(Reason::Park) {
                    running.orders.reason = None;
                }
            }
            Order::Reconfigure { grant } => running.orders.grant = Some(grant),
            Order::Limit { left_ms } => {
                running.orders.limit = Some(Duration::from_millis(left_ms));
            }
            Order::Split => running.orders.split = running.shares.is_some(),
            // The answer to a capsule that is over.
            Order::Reserved(_) | Order::Surroundings(_) | Order::Asked(_) => {}
            // Nobody waits for the data any more.
            Order::Data { .. } => {}
            Order::Cancel => running.orders.cancel = true,
            Order::Committed { index } => {
                while let Some((sent, at)) = running.sent.front().copied()
                    && sent <= index
                {
                    running.sent.pop_front();
                    // Not this moment: the acknowledgement may have waited unread during a long
                    // capsule. That time is no cost of the commit.
                    let latency = running.empty_at.saturating_sub(at);
                    running.schedule.acknowledged(latency);
                }
            }
            Order::Stretch { interval_ms } => {
                running
                    .schedule
                    .stretch(Duration::from_millis(interval_ms.into()));
            }
            // Keep for later: a preparation during a run.
            order @ (Order::Prepare { .. } | Order::Heat { .. } | Order::Run(_)) => {
                self.orders.push_back((order, body))
            }
        }
        Ok(())
    }
}
