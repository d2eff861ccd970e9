//! Inserts over gRPC, including those that wait.

use std::time::Duration;

use prost::Message as _;
use tonic::{Response, Status};

use super::{Service, results};
use crate::{
    ingress::net::budget::{Share, WAITING_TASK},
    model::{Caller, NewTask, WaitFor},
    wire::pb,
};

/// The most bytes of results in an answer, unless the caller says: every client accepts 4 MiB.
const RESULT_BYTES: usize = (3 << 20) + (512 << 10);
/// The most bytes of everything else in it: ids, errors, and the names of workers.
const BESIDE: usize = 512 << 10;

impl Service {
    /// Inserts tasks, and waits until they or their trees end if the request says so. The memory of the request's
    /// parts is given back before the wait.
    pub(super) async fn insert(
        &self,
        caller: &Caller,
        share: &Share,
        wait: Result<Option<(Duration, WaitFor)>, String>,
        max_bytes: u64,
        tasks: Vec<Result<NewTask, String>>,
    ) -> Result<Response<pb::InsertTasksResponse>, Status> {
        let Some((wait, wait_for)) = wait.map_err(Status::invalid_argument)? else {
            let answers = self.0.api.insert(caller, tasks).await?;
            return Ok(Response::new(pb::InsertTasksResponse {
                results: results(answers),
            }));
        };
        let bytes = tasks.len() * WAITING_TASK;
        let (stored, room) = (
            || share.become_answer(bytes),
            |bytes| self.0.budget.answer(&caller.access, bytes).ok(),
        );
        let max_bytes = if max_bytes == 0 {
            RESULT_BYTES
        } else {
            usize::try_from(max_bytes).unwrap_or(usize::MAX)
        };
        let (awaited, room) = self
            .0
            .api
            .insert_and_wait(caller, tasks, (wait, wait_for), max_bytes, stored, room)
            .await?;
        let mut answer = pb::InsertTasksResponse {
            results: results(awaited),
        };
        drop(room);
        let bytes = cut(&mut answer, max_bytes.saturating_add(BESIDE));
        let room = self.0.budget.answer(&caller.access, bytes);
        if room.is_err() {
            // The tasks are stored, so the caller must get an answer.
            answer
                .results
                .iter_mut()
                .for_each(|one| one.results.clear());
        }
        let mut response = Response::new(answer);
        if let Ok(room) = room {
            response.extensions_mut().insert(room);
        }
        Ok(response)
    }
}

/// Removes the last results from an answer that is longer than `most`, as it may be with many small
/// ones. Returns its length.
fn cut(answer: &mut pb::InsertTasksResponse, most: usize) -> usize {
    let mut bytes = answer.encoded_len();
    for one in answer.results.iter_mut().rev() {
        if bytes <= most {
            break;
        }
        let whole = one.encoded_len();
        one.results.clear();
        bytes -= whole - one.encoded_len();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_too_long_loses_its_last_results() {
        let result = pb::TaskResult {
            worker: "w".repeat(100),
            ..Default::default()
        };
        let one = pb::InsertResult {
            id: "i".into(),
            results: vec![result; 10],
            ..Default::default()
        };
        let mut answer = pb::InsertTasksResponse {
            results: vec![one; 3],
        };
        let whole = answer.encoded_len();
        assert_eq!(cut(&mut answer, whole), whole);
        cut(&mut answer, whole / 2);
        assert!(answer.encoded_len() <= whole / 2);
        let left: Vec<usize> = answer.results.iter().map(|one| one.results.len()).collect();
        assert_eq!(left, [10, 0, 0]);
        assert_eq!(answer.results[2].id, "i");
    }
}
