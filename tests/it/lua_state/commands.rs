//! How many commands a call makes inside Redis. Each costs, and so do its arguments in Lua: a call
//! makes as many for a hundred tasks as for ten, and few for none. The bounds leave room for two
//! more.

use taskd::redis_pool::{Call, Script, scripts};

use super::{Fixture, body, claim::claim, enqueue::enqueue_all, report::complete_all};

impl Fixture {
    /// Runs a script; answers how many commands it made.
    async fn commands(&self, script: &'static Script, args: impl FnOnce(&mut Call)) -> u64 {
        let mut conn = self.redis.conn();
        // Redis knows the script from now on.
        drop(self.run(script, |_| {}).await);
        let () = redis::cmd("CONFIG")
            .arg("RESETSTAT")
            .query_async(&mut conn)
            .await
            .expect("reset");
        self.run(script, args).await.expect(script.name);
        let info: String = redis::cmd("INFO")
            .arg("commandstats")
            .query_async(&mut conn)
            .await
            .expect("info");
        let calls = |line: &str| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let is_inside = !["evalsha", "config|resetstat", "info"].contains(&name);
            is_inside.then(|| {
                rest.split(',')
                    .next()
                    .expect("a number")
                    .parse::<u64>()
                    .expect("a number")
            })
        };
        info.lines().filter_map(calls).sum()
    }
}

fn task_id(n: usize) -> Vec<u8> {
    [
        &b"0123456789ab"[..],
        &u32::try_from(n).expect("few").to_be_bytes(),
    ]
    .concat()
}

/// Commands of the calls of a task's life, `count` tasks a call.
async fn commands_of_a_life(count: usize, workers: usize) -> [(&'static str, u64, u64); 6] {
    let f = Fixture::new().await;
    let ids: Vec<_> = (0..count).map(task_id).collect();
    let enqueued = f
        .commands(&scripts::ENQUEUE, |call| enqueue_all(call, &ids, &body(2)))
        .await;
    let names: Vec<_> = (0..workers).map(|n| format!("worker-{n}")).collect();
    let each = (count / workers) as u64;
    let requests: Vec<_> = names.iter().map(|name| (name.as_str(), each)).collect();
    let claimed = f
        .commands(&scripts::CLAIM, |call| claim(call, &requests))
        .await;
    let empty = f
        .commands(&scripts::CLAIM, |call| claim(call, &requests))
        .await;
    // Grants count from 1, and a request takes the next ones.
    let held: Vec<_> = (0..count)
        .map(|n| format!("h{}:{}", n as u64 / each + 1, names[n / each as usize]))
        .collect();
    let completed = f
        .commands(&scripts::COMPLETE, |call| complete_all(call, &ids, &held))
        .await;
    let finals = |call: &mut Call| {
        call.arg(-1).arg(1000);
    };
    let finals = f.commands(&scripts::FINALS, finals).await;
    let forget = |call: &mut Call| {
        call.arg("1".repeat(count)).arg(-1).arg(ids.concat());
    };
    let forgotten = f.commands(&scripts::FORGET, forget).await;
    let left = f.state().await;
    assert_eq!(
        (left.get("records"), left.get("finals"), left.get("leases")),
        (None, None, None)
    );
    [
        ("enqueue", enqueued, 16),
        ("claim", claimed, 20),
        ("empty claim", empty, 4),
        ("complete", completed, 10),
        ("finals", finals, 5),
        ("forget", forgotten, 7),
    ]
}

#[tokio::test]
async fn a_call_makes_as_many_commands_for_a_hundred_tasks_as_for_ten() {
    let (ten, hundred) = (
        commands_of_a_life(10, 1).await,
        commands_of_a_life(100, 1).await,
    );
    println!("commands of a call, and the bound: {hundred:?}");
    assert_eq!(ten, hundred);
    for (script, commands, bound) in hundred {
        assert!(
            commands <= bound,
            "{script} makes {commands} commands a call; at most {bound}"
        );
    }
}

#[tokio::test]
async fn a_hundred_callers_together_cost_no_more_commands_than_one() {
    let (one, hundred) = (
        commands_of_a_life(100, 1).await,
        commands_of_a_life(100, 100).await,
    );
    for ((script, commands, _), (_, of_one, _)) in hundred.iter().zip(one) {
        assert!(
            *commands <= of_one,
            "{script} makes {commands} commands for a hundred callers, {of_one} for one"
        );
    }
}
