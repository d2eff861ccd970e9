//! Topologies: applying, showing and deleting them.

use std::collections::HashMap;

use tracing::Instrument as _;

use super::{
    access::{reaches, who},
    error::Error,
    handle::{Api, span},
    reader::Reader,
    topology_feeds::check_redis_feeds,
};
use crate::{
    config::Settings,
    feeds,
    model::{
        Act, Caller, ECHO, FeedView, MOST_TOPOLOGIES, QueueName, StageView, Topology, TopologyView,
        in_short, shorten, validate::lease_duration,
    },
    store::{KeptTopology, Leaving, StoredTopology},
};

/// How often a change is tried again that others have outrun.
const TRIES: usize = 5;

impl Api {
    /// The topologies that the caller reaches, without their files.
    pub async fn topologies(&self, caller: &Caller) -> Result<Vec<TopologyView>, Error> {
        let query = self.query()?;
        let list = async {
            let mut views = Vec::new();
            for stored in query.store().topologies().await? {
                let view = view(&query.settings, stored);
                if may_see(caller, &view).is_ok() {
                    let text = String::new();
                    views.push(TopologyView { text, ..view });
                }
            }
            query.fill_in(&mut views).await?;
            Ok(views)
        };
        list.instrument(span("topologies", caller)).await
    }

    /// One topology, with its file and the settings in force.
    pub async fn topology(&self, caller: &Caller, name: &str) -> Result<TopologyView, Error> {
        let query = self.query()?;
        let get = async {
            let stored = query.stored_topology(name).await?;
            let mut view = view(&query.settings, stored.ok_or_else(|| unknown(name))?);
            may_see(caller, &view)?;
            query.fill_in(std::slice::from_mut(&mut view)).await?;
            Ok(view)
        };
        get.instrument(span("topology", caller)).await
    }

    /// Applies a file. All mistakes are named, and the removed stages that have unfinished tasks; then
    /// nothing has changed.
    pub async fn apply_topology(
        &self,
        caller: &Caller,
        name: &str,
        text: &str,
    ) -> Result<TopologyView, Error> {
        let query = self.query()?;
        let apply = async {
            let topology = checked(&query.settings, text)?;
            if topology.name.as_str() != name {
                return Err(Error::Invalid(format!(
                    "the file is of topology {}, and the request of {:?}",
                    topology.name,
                    shorten(name, ECHO)
                )));
            }
            for stage in &topology.stages {
                reaches(caller, stage.queue.as_str())?;
            }
            if !topology.then.is_empty() {
                reaches(caller, &topology.then)?;
            }
            check_redis_feeds(caller, &topology)?;
            self.check_topic_feeds(caller, &topology).await?;
            self.check_stage_topics(caller, &topology).await?;
            let now = query.now_unix_ms();
            let act = Act::at_time(now, who(caller), "apply topology", name);
            for _ in 0..TRIES {
                let known = query.stored_topology(name).await?;
                let version = known.as_ref().map_or(0, |known| known.version);
                let mut queues = known.as_ref().map(queues_of).unwrap_or_default();
                if known.is_some() {
                    reaches_unread(caller, name, &queues)?;
                }
                for queue in &queues {
                    reaches(caller, queue.as_str())?;
                }
                queues.retain(|queue| !topology.stages.iter().any(|one| one.queue == *queue));
                let leaving = Leaving {
                    queues,
                    subscriptions: self
                        .leaving_feeds(caller, known.as_ref(), Some(&topology))
                        .await?,
                };
                let mut wanted = StoredTopology {
                    name: topology.name.clone(),
                    version,
                    text: text.to_owned(),
                    applied_by: who(caller).to_owned(),
                    applied_unix_ms: now,
                };
                let kept = query.store().keep_topology(&wanted, &leaving, &act).await?;
                if is_kept(kept, "leave")? {
                    query.follow_topologies().await;
                    self.put_topic_feeds(caller, &topology, &wanted).await?;
                    wanted.version += 1;
                    let mut view = view(&query.settings, wanted);
                    query.fill_in(std::slice::from_mut(&mut view)).await?;
                    return Ok(view);
                }
            }
            Err(changed(name))
        };
        apply.instrument(span("apply_topology", caller)).await
    }

    /// Deletes a topology. Its queues stay, with their finished tasks.
    pub async fn delete_topology(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        let query = self.query()?;
        let delete = async {
            let now = query.now_unix_ms();
            let act = Act::at_time(now, who(caller), "delete topology", name);
            for _ in 0..TRIES {
                let known = query.stored_topology(name).await?;
                let known = known.ok_or_else(|| unknown(name))?;
                let queues = queues_of(&known);
                reaches_unread(caller, name, &queues)?;
                for queue in &queues {
                    reaches(caller, queue.as_str())?;
                }
                let leaving = Leaving {
                    queues,
                    subscriptions: self.leaving_feeds(caller, Some(&known), None).await?,
                };
                let store = query.store();
                let kept = store
                    .delete_topology(&known.name, known.version, &leaving, &act)
                    .await?;
                if is_kept(kept, "would leave")? {
                    query.follow_topologies().await;
                    return Ok(());
                }
            }
            Err(changed(name))
        };
        delete.instrument(span("delete_topology", caller)).await
    }
}

impl Reader {
    /// Fills in what changes all the time.
    async fn fill_in(&self, views: &mut [TopologyView]) -> Result<(), Error> {
        self.count_open(views).await?;
        self.fill_in_feeds(views).await
    }

    /// Counts the open trees of topologies with a bound.
    async fn count_open(&self, views: &mut [TopologyView]) -> Result<(), Error> {
        let mut queues = Vec::new();
        for view in views.iter().filter(|view| view.max_open > 0) {
            let starts = view.stages.iter().filter(|stage| stage.start);
            for stage in starts {
                queues.extend(QueueName::new(&stage.queue));
            }
        }
        if queues.is_empty() {
            return Ok(());
        }
        let open: HashMap<QueueName, u64> = self
            .store()
            .open_trees_of(&queues)
            .await?
            .into_iter()
            .collect();
        for view in views.iter_mut().filter(|view| view.max_open > 0) {
            let of_stages = view
                .stages
                .iter()
                .filter_map(|stage| open.get(&*stage.queue));
            view.open = of_stages.sum();
        }
        Ok(())
    }

    async fn stored_topology(&self, name: &str) -> Result<Option<StoredTopology>, Error> {
        let all = self.store().topologies().await?;
        Ok(all.into_iter().find(|known| known.name.as_str() == name))
    }

    /// Lets this process know a change at once. The others find it within half a second, as this one
    /// does if it fails now.
    async fn follow_topologies(&self) {
        let known = self.occupancy.topologies();
        if let Err(error) = known.follow(&*self.store).await {
            tracing::debug!("cannot read topologies, trying again: {error}");
        }
    }
}

/// Reads a file, and checks what depends on the settings of this process.
fn checked(settings: &Settings, text: &str) -> Result<Topology, Error> {
    let topology = Topology::read(text).map_err(|mistakes| {
        let mistakes: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        Error::Invalid(mistakes.join("; "))
    })?;
    let mut mistakes = Vec::new();
    for stage in &topology.stages {
        let max = settings.limits.max_lease;
        let lease = stage.lease.map(|lease| lease_duration("lease", lease, max));
        if let Some(Err(error)) = lease {
            mistakes.push(format!("stage {}: {error}", stage.name));
        }
        let rules = settings.task_rules(stage.queue.as_str());
        if rules.replicas > 1 {
            mistakes.push(format!(
                "stage {}: its queue has replicas = {}, and only the outputs of the first worker would count",
                stage.name, rules.replicas
            ));
        }
    }
    for feed in &topology.feeds {
        if let Err(error) = feeds::check(feed) {
            mistakes.push(format!("feed {}: {}", feed.name, in_short(&error)));
        }
    }
    match mistakes.is_empty() {
        true => Ok(topology),
        false => Err(Error::Invalid(mistakes.join("; "))),
    }
}

/// False if somebody has changed the topology meanwhile.
fn is_kept(kept: KeptTopology, leave: &str) -> Result<bool, Error> {
    match kept {
        KeptTopology::Yes => Ok(true),
        KeptTopology::Changed => Ok(false),
        KeptTopology::Unfinished(queues) => {
            let queues: Vec<&str> = queues.iter().map(QueueName::as_str).collect();
            Err(Error::Invalid(format!(
                "stages {leave} that have unfinished tasks: {}; wait for them, or cancel them",
                queues.join(", ")
            )))
        }
        KeptTopology::NoRoom => Err(Error::Invalid(format!(
            "there are {MOST_TOPOLOGIES} topologies; delete one before"
        ))),
    }
}

fn changed(name: &str) -> Error {
    Error::Invalid(format!(
        "topology {name} is being changed by others; look at it, and try again"
    ))
}

fn unknown(name: &str) -> Error {
    Error::NoSuchTopology(shorten(name, ECHO).into_owned())
}

/// Refuses a caller that does not reach all stages.
fn may_see(caller: &Caller, view: &TopologyView) -> Result<(), Error> {
    let stages: Vec<_> = view.stages.iter().map(|stage| &stage.queue).collect();
    reaches_unread(caller, view.name.as_str(), &stages)?;
    for stage in &view.stages {
        reaches(caller, &stage.queue)?;
    }
    Ok(())
}

/// Refuses a caller that does not reach all queues that a topology may have, if this version cannot
/// read its file, so that it has no `stages`.
fn reaches_unread<T>(caller: &Caller, name: &str, stages: &[T]) -> Result<(), Error> {
    if stages.is_empty() {
        reaches(caller, &format!("{name}."))?;
    }
    Ok(())
}

/// The queues of the stages; none if this version cannot read the file.
fn queues_of(stored: &StoredTopology) -> Vec<QueueName> {
    let stages = Topology::read(&stored.text).map(|topology| topology.stages);
    let stages = stages.unwrap_or_default();
    stages.into_iter().map(|stage| stage.queue).collect()
}

fn view(settings: &Settings, stored: StoredTopology) -> TopologyView {
    let StoredTopology {
        name,
        version,
        text,
        applied_by,
        applied_unix_ms,
    } = stored;
    let read = Topology::read(&text);
    let mut view = TopologyView::new(&name, version, applied_by, applied_unix_ms, text);
    match read {
        Ok(topology) => {
            view.on_dead = topology.on_dead;
            view.timeout = topology.timeout;
            for stage in &topology.stages {
                let rules = settings.task_rules(stage.queue.as_str());
                view.stages.push(StageView::new(&topology, stage, &rules));
            }
            view.feeds = topology
                .feeds
                .iter()
                .map(|feed| FeedView::new(&topology, feed))
                .collect();
            view.then = topology.then;
            view.max_open = topology.max_open;
        }
        Err(mistakes) => {
            view.error = mistakes
                .first()
                .map(ToString::to_string)
                .unwrap_or_default();
        }
    }
    view
}
