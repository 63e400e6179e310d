//! A value that is read again and again: the last one, since when it is so old, and what is wrong now.

use std::sync::Arc;

use fiec_schemas::Timestamp;
use tokio::sync::watch;

/// The last value, and the trouble since then.
#[derive(Debug)]
pub struct Known<T> {
    /// The last value that was read.
    pub value: Option<Arc<T>>,
    /// When that was.
    pub at: Option<Timestamp>,
    /// Why it could not be read since.
    pub trouble: Option<String>,
    /// Nobody has looked for a while, and it was not read since.
    pub is_old: bool,
}

impl<T> Clone for Known<T> {
    fn clone(&self) -> Self {
        Self {
            value: self.value.clone(),
            at: self.at,
            trouble: self.trouble.clone(),
            is_old: self.is_old,
        }
    }
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self {
            value: None,
            at: None,
            trouble: None,
            is_old: false,
        }
    }
}

/// Where a value is kept.
#[derive(Debug)]
pub struct Kept<T>(watch::Sender<Known<T>>);

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(watch::Sender::new(Known::default()))
    }
}

impl<T: PartialEq> Kept<T> {
    /// The latest value.
    pub fn now(&self) -> Known<T> {
        self.0.borrow().clone()
    }

    /// Keeps what was read. True if pages have to say something else than before.
    pub fn keep(&self, read: Result<T, String>) -> bool {
        let mut changed = false;
        self.0.send_modify(|known| {
            let was_old = std::mem::take(&mut known.is_old);
            match read {
                Ok(value) => {
                    changed = known.trouble.take().is_some()
                        || was_old
                        || known.value.as_deref().is_none_or(|old| *old != value);
                    known.value = Some(Arc::new(value));
                    known.at = Some(Timestamp::now());
                }
                Err(trouble) => {
                    changed = known.trouble.as_ref() != Some(&trouble);
                    known.trouble = Some(trouble);
                }
            }
        });
        changed
    }

    /// Marks the value as old: a page waits for the next one.
    pub fn forget_age(&self) {
        self.0.send_modify(|known| known.is_old = true);
    }

    /// Waits until something was read, or could not be.
    pub async fn first(&self) -> Known<T> {
        let mut watched = self.0.subscribe();
        let known = watched
            .wait_for(|known| !known.is_old && (known.value.is_some() || known.trouble.is_some()));
        match known.await {
            Ok(known) => known.clone(),
            // The sender is `self`.
            Err(_) => Known::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_the_last_value_and_says_since_when_it_is_old() {
        let kept = Kept::default();
        assert!(kept.keep(Ok(1)));
        assert!(!kept.keep(Ok(1)), "nothing to show");
        let at = kept.now().at;
        assert!(kept.keep(Err("away".to_owned())));
        assert!(!kept.keep(Err("away".to_owned())));
        let known = kept.now();
        assert_eq!((known.value.as_deref(), known.at), (Some(&1), at));
        assert_eq!(known.trouble.as_deref(), Some("away"));
        assert!(kept.keep(Ok(1)), "it is well again");
    }
}
