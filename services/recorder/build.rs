//! The migrations and views are compiled in: a changed or new file among them leads to a new build.
fn main() {
    println!("cargo:rerun-if-changed=../../migrations");
}
