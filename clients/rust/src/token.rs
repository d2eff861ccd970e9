//! The access token of a caller.

use std::str::FromStr;

use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::Interceptor,
};

/// An access token, sent with each call. The default sends none.
#[derive(Clone, Default)]
pub struct Token(Option<MetadataValue<Ascii>>);

impl FromStr for Token {
    type Err = String;

    fn from_str(token: &str) -> Result<Self, String> {
        let bearer = format!("Bearer {}", token.trim()).parse();
        let mut bearer: MetadataValue<Ascii> =
            bearer.map_err(|_| "it is no token: it has odd characters".to_owned())?;
        bearer.set_sensitive(true);
        Ok(Self(Some(bearer)))
    }
}

impl Token {
    /// The value of the HTTP header `Authorization`.
    pub fn header(&self) -> Option<&[u8]> {
        self.0.as_ref().map(MetadataValue::as_encoded_bytes)
    }
}

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(bearer) = &self.0 {
            request
                .metadata_mut()
                .insert("authorization", bearer.clone());
        }
        Ok(request)
    }
}
