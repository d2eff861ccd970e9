//! Generates the Rust code of `proto/taskd/v1`: `taskd-proto PROTO DAEMON CLIENT`.
//!
//! CLIENT gets the messages of `taskd.proto` and the clients of its services. DAEMON gets the rest: the servers, the
//! messages of `records.proto`, and the descriptors of all.

use std::{env, error::Error, fs, path::PathBuf};

const PUBLIC: &str = "taskd/v1/taskd.proto";
const RECORDS: &str = "taskd/v1/records.proto";
/// Where the daemon finds the messages of the client.
const MESSAGES: &str = "::taskd_client::pb";

fn main() -> Result<(), Box<dyn Error>> {
    let [proto, daemon, client] = [1, 2, 3].map(|i| env::args_os().nth(i).map(PathBuf::from));
    let (Some(proto), Some(daemon), Some(client)) = (proto, daemon, client) else {
        return Err("usage: taskd-proto PROTO DAEMON CLIENT".into());
    };
    // protox is a protobuf compiler in Rust: nobody needs protoc.
    let public = protox::compile([PUBLIC], [&proto])?;
    let all = protox::compile([PUBLIC, RECORDS], [&proto])?;
    fs::write(
        daemon.join("descriptors.bin"),
        prost::Message::encode_to_vec(&all),
    )?;
    // taskd forwards payloads without reading them. `Bytes` makes each hop a reference count instead of a copy.
    let configure = || tonic_prost_build::configure().bytes(".");
    let mut servers = configure()
        .build_client(false)
        .codec_path("crate::wire::grpc_codec::Codec")
        .out_dir(&daemon);
    for file in public.file.iter().filter(|file| file.name() == PUBLIC) {
        let messages = file.message_type.iter().map(|message| message.name());
        for name in messages.chain(file.enum_type.iter().map(|of| of.name())) {
            servers = servers.extern_path(
                format!(".{}.{name}", file.package()),
                format!("{MESSAGES}::{name}"),
            );
        }
    }
    servers.compile_fds(all)?;
    configure()
        .build_server(false)
        .codec_path("crate::codec::Codec")
        .out_dir(&client)
        .compile_fds(public)?;
    for folder in [daemon, client] {
        fs::rename(folder.join("taskd.v1.rs"), folder.join("generated.rs"))?;
    }
    Ok(())
}
