//! The gRPC codec: prost messages that are inspected before they are decoded.
//!
//! A message of a few bytes can take hundreds of bytes of memory once decoded. A server therefore
//! counts the parts of a message first ([`inspected`]), and answers an unreadable message with
//! INVALID_ARGUMENT, because the mistake is the caller's.

use std::{future::Future, marker::PhantomData, sync::Arc};

use bytes::Buf as _;
use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, DecodeBuf, Decoder},
};
use tonic_prost::ProstEncoder;

/// Most messages are small, so buffers start small and grow to what a message needs; tonic's
/// default is 8 KiB.
fn buffers() -> BufferSettings {
    BufferSettings::new(512, 32 << 10)
}

/// Checks an encoded message. An error rejects the message, and becomes the answer of the call.
pub type Inspector = Arc<dyn Fn(&[u8]) -> Result<(), Status> + Send + Sync>;

tokio::task_local! {
    static INSPECTOR: Inspector;
}

/// Runs `call`, and runs `inspector` on each message before the call decodes it.
pub fn inspected<T>(
    inspector: Inspector,
    call: impl Future<Output = T>,
) -> impl Future<Output = T> {
    INSPECTOR.scope(inspector, call)
}

/// The inspector of the current call, to be passed to a part of it that runs in another task.
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

/// Decodes messages, after the inspector of the call, if there is one, has accepted them.
pub struct Inspected<U>(PhantomData<U>);

impl<U: Message + Default> Decoder for Inspected<U> {
    type Item = U;
    type Error = Status;

    fn buffer_settings(&self) -> BufferSettings {
        buffers()
    }

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // The buffer is contiguous, so the chunk is the whole message.
        let verdict = INSPECTOR.try_with(|inspect| inspect(buf.chunk()));
        let is_server = verdict.is_ok();
        verdict.unwrap_or(Ok(()))?;
        U::decode(buf).map(Some).map_err(|error| match is_server {
            true => Status::invalid_argument(format!("the message cannot be read: {error}")),
            false => Status::internal(error.to_string()),
        })
    }
}
