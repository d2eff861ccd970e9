//! Generates the Rust code and the descriptors of `proto/taskd/v1` into a folder: `taskd-proto PROTO OUT`.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let [proto, out] = [1, 2].map(|i| env::args_os().nth(i).map(PathBuf::from));
    let (Some(proto), Some(out)) = (proto, out) else { return Err("usage: taskd-proto PROTO OUT".into()) };
    // protox is a protobuf compiler in Rust: nobody needs protoc.
    let descriptors = protox::compile(["taskd/v1/taskd.proto", "taskd/v1/records.proto"], [proto])?;
    fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    // taskd forwards payloads without reading them. `Bytes` makes each hop a reference count instead of a copy.
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::wire::grpc_codec::Codec")
        .out_dir(&out)
        .compile_fds(descriptors)?;
    fs::rename(out.join("taskd.v1.rs"), out.join("generated.rs"))?;
    Ok(())
}
