//! Signatures of posts: Standard Webhooks, version 1
//! (<https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md>).

use std::path::Path;

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use fiec_schemas::Secret;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

const PREFIX: &str = "whsec_";
/// Bytes of a secret, as the specification has them.
const BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// The key of the signatures.
pub struct Key(Hmac<Sha256>);

impl Key {
    /// Reads `whsec_` and the key in base64 from a file.
    ///
    /// # Errors
    /// If it cannot be read, or holds no such key.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&Secret::from(text.trim())).with_context(|| path.display().to_string())
    }

    fn parse(text: &Secret) -> anyhow::Result<Self> {
        let rule = "must hold whsec_ and 24 to 64 bytes in base64, e.g. from \
                    `echo whsec_$(head -c 32 /dev/urandom | base64)`";
        let Some(key) = text.expose().strip_prefix(PREFIX) else {
            bail!(rule);
        };
        match BASE64_STANDARD.decode(key) {
            Ok(key) if BYTES.contains(&key.len()) => Ok(Self(Hmac::new_from_slice(&key)?)),
            _ => bail!(rule),
        }
    }

    /// The header `webhook-signature` of a post. `at`: seconds since 1970.
    pub fn sign(&self, id: &str, at: i64, body: &[u8]) -> String {
        let mut mac = self.0.clone();
        mac.update(format!("{id}.{at}.").as_bytes());
        mac.update(body);
        let signature = BASE64_STANDARD.encode(mac.finalize().into_bytes());
        format!("v1,{signature}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_other_implementations() {
        let key = Key::parse(&"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into()).unwrap();
        let signed = key.sign(
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            br#"{"test": 2432232314}"#,
        );
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn what_is_no_key_is_refused() {
        for wrong in ["", "whsec_", "secret", "whsec_AAAA", "whsec_not base64"] {
            assert!(Key::parse(&wrong.into()).is_err(), "{wrong}");
        }
    }
}
