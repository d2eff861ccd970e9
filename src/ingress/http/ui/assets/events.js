// The live tab of a queue: the last events of its tasks, as the stream tells them. The stream is
// closed while the page is hidden, and after ten minutes. A refused one is opened again a few times,
// because a browser does that only after a lost connection.
"use strict";
(() => {
  const MOST = 200;
  const LONGEST = 600000;
  const RETRIES = 5;
  const RETRY_AFTER = 3000;
  const table = document.querySelector("table[data-events]");
  const says = document.getElementById("stream");
  const button = document.getElementById("stream-pause");
  if (!table || !says || !button) return;
  const rows = table.tBodies[0];
  let source = null;
  let timer = 0;
  let retry = 0;
  let refusals = 0;
  let paused = false;

  const add = (...cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) {
      const part = document.createElement("td");
      part.append(cell);
      row.append(part);
    }
    rows.prepend(row);
    while (rows.rows.length > MOST) rows.deleteRow(-1);
  };

  const show = (event) => {
    const time = document.createElement("time");
    time.dateTime = event.at;
    time.title = event.at;
    time.textContent = new Date(event.at).toLocaleTimeString();
    const link = document.createElement("a");
    link.href = table.dataset.tasks + encodeURIComponent(event.id);
    const key = document.createElement("bdi");
    key.textContent = event.key || event.id;
    link.append(key);
    add(time, event.status, link);
  };

  const close = (why) => {
    if (source) source.close();
    source = null;
    clearTimeout(timer);
    clearTimeout(retry);
    says.textContent = why;
  };

  const pause = (why) => {
    paused = true;
    button.textContent = "Go on";
    close(why);
  };

  const open = () => {
    if (source || paused || document.hidden) return;
    if (rows.rows.length) add("", "–", "Events in between are not shown.");
    says.textContent = "connecting";
    source = new EventSource(table.dataset.events);
    timer = setTimeout(() => pause("paused after 10 minutes"), LONGEST);
    source.addEventListener("open", () => {
      refusals = 0;
      says.textContent = "live";
    });
    source.addEventListener("status", (event) => show(JSON.parse(event.data)));
    source.addEventListener("gap", () => add("", "–", "Some events are missing here."));
    source.addEventListener("end", (event) => { says.textContent = JSON.parse(event.data).detail; });
    source.addEventListener("error", () => {
      if (!source) return;
      if (source.readyState !== EventSource.CLOSED) {
        says.textContent = "lost: trying again";
        return;
      }
      refusals += 1;
      if (refusals > RETRIES) {
        close("refused: load the page again");
        return;
      }
      close("refused: trying again");
      retry = setTimeout(open, RETRY_AFTER * refusals);
    });
  };

  button.hidden = false;
  button.addEventListener("click", () => {
    if (!paused) { pause("paused"); return; }
    paused = false;
    refusals = 0;
    button.textContent = "Pause";
    open();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) open();
    else if (source) close("closed while hidden");
  });
  open();
})();
