//! The broker's store on its disk, damaged as a power loss damages it.

use std::fs;
use std::path::PathBuf;

use super::Lab;

/// The blocks of a stream, in order.
fn blocks(lab: &Lab, stream: &str) -> Vec<PathBuf> {
    let data = lab.servers.nats.data_dir();
    let folder = data.join("jetstream/$G/streams").join(stream).join("msgs");
    let number = |path: &PathBuf| path.file_stem()?.to_str()?.parse::<u64>().ok();
    let mut blocks: Vec<PathBuf> = fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "blk"))
        .collect();
    blocks.sort_by_key(number);
    blocks
}

/// Bytes of a stream's last block.
pub fn length(lab: &Lab, stream: &str) -> u64 {
    let last = blocks(lab, stream).pop().expect("the stream has a block");
    fs::metadata(last).unwrap().len()
}

/// Cuts `bytes` off the end of a stream, of a broker that does not run, with the index that
/// would say what was there.
pub fn cut_tail(lab: &Lab, stream: &str, bytes: u64) {
    let last = blocks(lab, stream).pop().expect("the stream has a block");
    let file = fs::OpenOptions::new().write(true).open(&last).unwrap();
    let length = file.metadata().unwrap().len();
    assert!(length > bytes, "{} has {length} bytes only", last.display());
    file.set_len(length - bytes).unwrap();
    let index = last.with_file_name("index.db");
    if index.exists() {
        fs::remove_file(index).unwrap();
    }
}

/// A copy of a stream's messages, of a broker that does not run.
pub fn saved(lab: &Lab, stream: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = blocks(lab, stream).into_iter();
    paths
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// Puts the messages of a stream back to such a copy. What its consumers have got stays.
pub fn put_back(lab: &Lab, stream: &str, copy: &[(PathBuf, Vec<u8>)]) {
    for path in blocks(lab, stream) {
        fs::remove_file(path).unwrap();
    }
    for (path, bytes) in copy {
        fs::write(path, bytes).unwrap();
        let _ = fs::remove_file(path.with_file_name("index.db"));
    }
}
