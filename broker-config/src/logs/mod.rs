//! What programs print: the stream of its pieces, and the pieces as a reader sees them.

mod feed;
mod shown;

pub use feed::Feed;
pub use shown::{Place, Shown, Text};
