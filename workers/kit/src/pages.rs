//! A big array that σ represents by the digests of its pages.
//!
//! σ then stays small for any array, and a resumed run starts before the array has arrived: a page
//! is fetched on its first use. A commit carries the pages that changed since the last one, as
//! outputs named `<name>/<digest>`. Like all outputs they stay in the object store. So `Pages`
//! suits arrays of which most pages do not change. An array with many changes is better part of σ,
//! since chunks are deleted when they are superseded.
//!
//! ```text
//! "FIECPAG1" │ bytes of a page u64 │ bytes u64 │ digest of each page, 32 bytes     little endian
//! ```

use fiec_schemas::Digest;

use crate::program::{Capsule, ProgramError};

const MAGIC: &[u8; 8] = b"FIECPAG1";
const HEAD: usize = 24;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Page {
    /// Not in memory.
    Cold(Digest),
    /// In memory, and stored under its digest.
    Clean(Digest, Vec<u8>),
    /// Changed since it was stored.
    Dirty(Vec<u8>),
}

impl Page {
    fn digest(&self) -> Digest {
        match self {
            Self::Cold(digest) | Self::Clean(digest, _) => *digest,
            Self::Dirty(bytes) => Digest::of(bytes),
        }
    }
}

/// Bytes in pages of one size. The last page may be shorter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    name: String,
    page_bytes: usize,
    bytes: usize,
    pages: Vec<Page>,
}

impl Pages {
    /// Divides these bytes into pages of `page_bytes` (at least 1). `name` is the prefix of its
    /// outputs.
    pub fn new(name: impl Into<String>, bytes: &[u8], page_bytes: usize) -> Self {
        let page_bytes = page_bytes.max(1);
        let pages = bytes.chunks(page_bytes);
        Self {
            name: name.into(),
            page_bytes,
            bytes: bytes.len(),
            pages: pages.map(|page| Page::Dirty(page.to_vec())).collect(),
        }
    }

    /// Total bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Number of pages, and number of pages in memory.
    pub fn count(&self) -> (usize, usize) {
        let here = self.pages.iter().filter(|p| !matches!(p, Page::Cold(_)));
        (self.pages.len(), here.count())
    }

    fn length(&self, at: usize) -> usize {
        self.page_bytes.min(
            self.bytes
                .saturating_sub(at.saturating_mul(self.page_bytes)),
        )
    }

    fn touched(&mut self, at: usize, cx: &mut Capsule) -> Result<&mut Page, ProgramError> {
        let (length, count) = (self.length(at), self.pages.len());
        let Some(page) = self.pages.get_mut(at) else {
            return Err(ProgramError::Permanent(format!(
                "there is no page {at} of {}: it has {count}",
                self.name
            )));
        };
        if let Page::Cold(digest) = *page {
            *page = Page::Clean(digest, cx.fetch(digest, length as u64)?);
        }
        Ok(page)
    }

    /// Returns the bytes of a page, fetched on its first use.
    ///
    /// # Errors
    /// Permanent if the page does not exist; otherwise those of [`Capsule::fetch`].
    pub fn page(&mut self, at: usize, cx: &mut Capsule) -> Result<&[u8], ProgramError> {
        match self.touched(at, cx)? {
            Page::Clean(_, bytes) | Page::Dirty(bytes) => Ok(bytes),
            Page::Cold(digest) => Err(ProgramError::Transient(format!("{digest} did not come"))),
        }
    }

    /// Returns the bytes of a page for writing. The page is then stored with the next commit.
    ///
    /// # Errors
    /// As [`Pages::page`].
    pub fn page_mut(&mut self, at: usize, cx: &mut Capsule) -> Result<&mut [u8], ProgramError> {
        let page = self.touched(at, cx)?;
        if let Page::Clean(_, bytes) = page {
            *page = Page::Dirty(std::mem::take(bytes));
        }
        match page {
            Page::Clean(_, bytes) | Page::Dirty(bytes) => Ok(bytes),
            Page::Cold(digest) => Err(ProgramError::Transient(format!("{digest} did not come"))),
        }
    }

    /// Declares the changed pages as outputs of the present commit. Call it from
    /// [`crate::State::settle`].
    pub fn settle(&mut self, cx: &mut Capsule) {
        for page in &mut self.pages {
            if let Page::Dirty(bytes) = page {
                let digest = Digest::of(bytes);
                cx.output_known(format!("{}/{digest}", self.name), bytes.clone(), digest);
                *page = Page::Clean(digest, std::mem::take(bytes));
            }
        }
    }

    /// Appends the digests of the pages: equal contents give equal bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(self.page_bytes as u64).to_le_bytes());
        out.extend_from_slice(&(self.bytes as u64).to_le_bytes());
        for page in &self.pages {
            out.extend_from_slice(&page.digest().0);
        }
    }

    /// Reads the list that [`Pages::encode`] appended, and advances `from` behind it. No page is in
    /// memory yet.
    ///
    /// # Errors
    /// When the bytes are no such list.
    pub fn decode(name: impl Into<String>, from: &mut &[u8]) -> Result<Self, ProgramError> {
        let name = name.into();
        let malformed =
            || ProgramError::Permanent(format!("the state has no list of pages of {name}"));
        let bytes = *from;
        if bytes.len() < HEAD || &bytes[..8] != MAGIC {
            return Err(malformed());
        }
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            usize::try_from(u64::from_le_bytes(word)).map_err(|_| malformed())
        };
        let (page_bytes, length) = (word(8)?, word(16)?);
        if page_bytes == 0 {
            return Err(malformed());
        }
        let count = length.div_ceil(page_bytes);
        let end = count
            .checked_mul(32)
            .and_then(|list| list.checked_add(HEAD))
            .filter(|end| *end <= bytes.len())
            .ok_or_else(malformed)?;
        let digests = bytes[HEAD..end].chunks_exact(32).map(|digest| {
            let mut found = [0; 32];
            found.copy_from_slice(digest);
            Page::Cold(Digest(found))
        });
        let pages = digests.collect();
        *from = &bytes[end..];
        Ok(Self {
            name,
            page_bytes,
            bytes: length,
            pages,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::program::Fetch;

    struct Shelf(Arc<Mutex<Vec<Vec<u8>>>>, Arc<AtomicUsize>);

    impl Fetch for Shelf {
        fn fetch(&mut self, digest: Digest, _: u64) -> Result<Vec<u8>, ProgramError> {
            self.1.fetch_add(1, Ordering::SeqCst);
            let shelf = self.0.lock().unwrap();
            let found = shelf.iter().find(|bytes| Digest::of(bytes) == digest);
            found
                .cloned()
                .ok_or_else(|| ProgramError::Permanent("not there".to_owned()))
        }
    }

    #[test]
    fn only_touched_pages_are_fetched_and_only_changed_ones_are_declared() {
        let all: Vec<u8> = (0..1_000u32).flat_map(u32::to_le_bytes).collect();
        let mut pages = Pages::new("big", &all, 512);
        let mut cx = Capsule::default();
        pages.settle(&mut cx);
        assert_eq!(cx.outputs().len(), 8);
        let shelf = cx.outputs().iter().map(|o| o.bytes.clone()).collect();
        let mut bytes = Vec::new();
        pages.encode(&mut bytes);
        bytes.push(7);

        let fetched = Arc::new(AtomicUsize::new(0));
        let shelf = Shelf(Arc::new(Mutex::new(shelf)), Arc::clone(&fetched));
        let mut cx = Capsule::with_fetch(3, Box::new(shelf));
        let mut rest = &bytes[..];
        let mut resumed = Pages::decode("big", &mut rest).unwrap();
        assert_eq!(
            (rest, resumed.count(), resumed.len()),
            (&[7][..], (8, 0), 4_000)
        );
        assert_eq!(resumed.page(7, &mut cx).unwrap(), &all[7 * 512..]);
        resumed.page_mut(2, &mut cx).unwrap()[0] ^= 1;
        resumed.page_mut(2, &mut cx).unwrap()[1] ^= 1;
        assert_eq!(
            (fetched.load(Ordering::SeqCst), resumed.count()),
            (2, (8, 2))
        );
        let (mut before, mut after) = (Vec::new(), Vec::new());
        resumed.encode(&mut before);
        resumed.settle(&mut cx);
        resumed.encode(&mut after);
        assert_eq!(before, after, "settling changes no bytes of σ");
        assert_ne!(bytes[..bytes.len() - 1], after);
        let names: Vec<_> = cx.outputs().iter().map(|o| o.name.clone()).collect();
        let changed = &resumed.page(2, &mut cx).unwrap().to_vec();
        assert_eq!(names, [format!("big/{}", Digest::of(changed))]);
        resumed.settle(&mut cx);
        assert_eq!(
            cx.outputs().len(),
            1,
            "what is stored is not declared again"
        );
        assert!(resumed.page(8, &mut cx).unwrap_err().is_permanent());
    }

    #[test]
    fn bytes_that_are_no_list_of_pages_are_refused() {
        let mut bytes = Vec::new();
        Pages::new("big", &[1; 100], 10).encode(&mut bytes);
        assert!(Pages::decode("big", &mut &bytes[..bytes.len() - 1]).is_err());
        assert!(Pages::decode("big", &mut &b"FIECPAG1"[..]).is_err());
        bytes[8..16].copy_from_slice(&0u64.to_le_bytes());
        assert!(Pages::decode("big", &mut &bytes[..]).is_err());
        bytes[8..16].copy_from_slice(&1u64.to_le_bytes());
        bytes[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Pages::decode("big", &mut &bytes[..]).is_err());
    }
}
