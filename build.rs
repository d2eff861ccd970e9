use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-changed=migrations");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // protox is a protobuf compiler in Rust: no protoc is needed to build.
    let descriptors = protox::compile(["taskd/v1/taskd.proto", "taskd/v1/records.proto"], ["proto"])?;
    fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    // Payloads are carried, not looked at: Bytes makes each hop a reference count instead of a copy.
    tonic_prost_build::configure().bytes(".").codec_path("crate::wire::grpc_codec::Codec").compile_fds(descriptors)?;
    Ok(())
}
