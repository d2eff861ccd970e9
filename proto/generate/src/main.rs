//! Generates the Rust code of `proto/taskd/v1`: `taskd-proto-generate PROTO FOLDER`.
//!
//! FOLDER gets the messages, the clients and servers of the services, and the descriptors of all.

use std::{env, error::Error, fs, path::PathBuf};

const PUBLIC: &str = "taskd/v1/taskd.proto";
const RECORDS: &str = "taskd/v1/records.proto";

fn main() -> Result<(), Box<dyn Error>> {
    let [proto, folder] = [1, 2].map(|i| env::args_os().nth(i).map(PathBuf::from));
    let (Some(proto), Some(folder)) = (proto, folder) else {
        return Err("usage: taskd-proto-generate PROTO FOLDER".into());
    };
    // protox is a protobuf compiler in Rust: nobody needs protoc.
    let all = protox::compile([PUBLIC, RECORDS], [&proto])?;
    fs::write(
        folder.join("descriptors.bin"),
        prost::Message::encode_to_vec(&all),
    )?;
    // taskd forwards payloads without reading them. `Bytes` makes each hop a reference count instead
    // of a copy.
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::Codec")
        .out_dir(&folder)
        .compile_fds(all)?;
    fs::rename(folder.join("taskd.v1.rs"), folder.join("generated.rs"))?;
    Ok(())
}
