//! gRPC's codec: messages as prost writes them, inspected before they are decoded.
//!
//! A message of a few bytes can become hundreds in memory. A server counts the parts of a message
//! first ([`inspected`]), and answers an unreadable one with INVALID_ARGUMENT: it is the caller's
//! mistake.

use std::{future::Future, marker::PhantomData, sync::Arc};

use bytes::Buf as _;
use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, DecodeBuf, Decoder},
};
use tonic_prost::ProstEncoder;

/// Most messages are small. A buffer grows to what a message needs; by default it begins with 8
/// KiB.
fn buffers() -> BufferSettings {
    BufferSettings::new(512, 32 << 10)
}

/// Looks at an encoded message; an error is the answer to it.
pub type Inspector = Arc<dyn Fn(&[u8]) -> Result<(), Status> + Send + Sync>;

tokio::task_local! {
    static INSPECTOR: Inspector;
}

/// Runs `call` with `inspector` before each message that it decodes.
pub fn inspected<T>(
    inspector: Inspector,
    call: impl Future<Output = T>,
) -> impl Future<Output = T> {
    INSPECTOR.scope(inspector, call)
}

/// The inspector of the call that runs now, for a part of it that goes on elsewhere.
pub fn inspector() -> Option<Inspector> {
    INSPECTOR.try_with(Arc::clone).ok()
}

/// The codec of the generated services.
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = Inspected<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(buffers())
    }

    fn decoder(&mut self) -> Self::Decoder {
        Inspected(PhantomData)
    }
}

/// Decodes a message that the call's inspector, if it has one, lets through.
pub struct Inspected<U>(PhantomData<U>);

impl<U: Message + Default> Decoder for Inspected<U> {
    type Item = U;
    type Error = Status;

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // The buffer is one piece, so the chunk is the whole message.
        let verdict = INSPECTOR.try_with(|inspect| inspect(buf.chunk()));
        let is_server = verdict.is_ok();
        verdict.unwrap_or(Ok(()))?;
        U::decode(buf).map(Some).map_err(|error| match is_server {
            true => Status::invalid_argument(format!("the message cannot be read: {error}")),
            false => Status::internal(error.to_string()),
        })
    }
}
