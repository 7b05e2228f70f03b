//! Generates `duemq.v1` from protos/.
use std::{error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new("../../../protos");
    println!("cargo::rerun-if-changed={}", root.display());
    let mut protos = Vec::new();
    for entry in fs::read_dir(root.join("duemq/v1"))? {
        protos.push(entry?.path());
    }
    let descriptors = protox::compile(protos, [root])?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors)?;
    Ok(())
}
