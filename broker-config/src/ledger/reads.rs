//! Reads of ledgers. Each may decide something, so the stream's leader has the last word.

use async_nats::jetstream::message::StreamMessage;
use bytes::Bytes;
use fiec_schemas::{ExecutionId, Sequence, StatePlace, Tenant, subjects};

use super::{Entry, Ledger, entry};
use crate::{BrokerError, leader, store};

impl Ledger {
    /// Returns the last message of an execution's ledger, if it has one.
    ///
    /// # Errors
    /// When the broker does not answer, or the message cannot be read.
    pub async fn last(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
    ) -> Result<Option<Entry>, BrokerError> {
        self.last_of(&subjects::ledger(tenant, execution)).await
    }

    /// Returns the last message of an execution's ledger as some copy has it. It may be old: it decides
    /// nothing but what is appended behind it.
    ///
    /// # Errors
    /// As [`Ledger::last`].
    pub async fn glimpse(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
    ) -> Result<Option<Entry>, BrokerError> {
        let subject = subjects::ledger(tenant, execution);
        let before = self.broker.connection();
        let last = leader::glimpse(self.stream().await?, &subject).await?;
        last.map(|message| self.seen(message, before)).transpose()
    }

    /// Returns the last message. `known` says whether it is as new as the caller knows that it must
    /// be. If not, it is read again for half a second: then the broker has lost what is known.
    ///
    /// # Errors
    /// As [`Ledger::last`].
    pub async fn last_known(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        known: impl Fn(&Entry) -> bool,
    ) -> Result<Option<Entry>, BrokerError> {
        let subject = subjects::ledger(tenant, execution);
        self.last_of_known(&subject, known).await
    }

    /// As [`Ledger::last_known`], for a message of this sequence or a later one. With 0 nothing is
    /// known.
    ///
    /// # Errors
    /// As [`Ledger::last`].
    pub async fn last_from(
        &self,
        tenant: &Tenant,
        execution: ExecutionId,
        from: Sequence,
    ) -> Result<Option<Entry>, BrokerError> {
        let subject = subjects::ledger(tenant, execution);
        self.last_of_from(&subject, from).await
    }

    pub(super) async fn last_of_from(
        &self,
        subject: &str,
        from: Sequence,
    ) -> Result<Option<Entry>, BrokerError> {
        if from == 0 {
            return self.last_of(subject).await;
        }
        self.last_of_known(subject, |last| last.seq >= from).await
    }

    async fn last_of_known(
        &self,
        subject: &str,
        known: impl Fn(&Entry) -> bool,
    ) -> Result<Option<Entry>, BrokerError> {
        let mut last = self.last_of(subject).await?;
        for _ in 0..leader::LOOKS {
            if last.as_ref().is_some_and(&known) {
                break;
            }
            tokio::time::sleep(leader::LOOK_AGAIN).await;
            last = self.last_of(subject).await?;
        }
        Ok(last)
    }

    async fn last_of(&self, subject: &str) -> Result<Option<Entry>, BrokerError> {
        let before = self.broker.connection();
        let last = leader::last(self.stream().await?, subject).await?;
        last.map(|message| self.seen(message, before)).transpose()
    }

    /// Returns the message of this sequence, from any copy of the stream that has it.
    ///
    /// # Errors
    /// When it has dropped out, or cannot be read.
    pub async fn by_sequence(&self, seq: Sequence) -> Result<Entry, BrokerError> {
        let before = self.broker.connection();
        let what = format!("ledger message {seq}");
        match leader::contents(self.stream().await?, seq, &what).await? {
            Some(message) => self.seen(message, before),
            None => Err(BrokerError::Missing {
                what,
                hint: ": it has dropped out of the stream; PostgreSQL has its history".to_owned(),
            }),
        }
    }

    /// Returns the message of this sequence as the leader has it, if it has one.
    ///
    /// # Errors
    /// When the broker does not answer, or the message cannot be read.
    pub(super) async fn at(&self, seq: Sequence) -> Result<Option<Entry>, BrokerError> {
        let before = self.broker.connection();
        let what = format!("ledger message {seq}");
        let found = leader::message(self.stream().await?, seq, &what).await?;
        found.map(|message| self.seen(message, before)).transpose()
    }

    /// Reads a message that was asked for in the connection `before`. If there is another one now, it
    /// is not known which of them it came from.
    fn seen(&self, message: StreamMessage, before: u64) -> Result<Entry, BrokerError> {
        let now = self.broker.connection();
        entry(message, if before == now { now } else { 0 })
    }

    /// Returns σ of the last commit from its place.
    ///
    /// # Errors
    /// When it is missing or damaged.
    pub async fn state(
        &self,
        execution: ExecutionId,
        place: &StatePlace,
    ) -> Result<Bytes, BrokerError> {
        store::get_state(&self.broker, execution, place).await
    }
}
