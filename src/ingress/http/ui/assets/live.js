// What the pages do with a script: a visible page asks for its frame every two seconds and merges
// it, and times are shown as local ones, too. Everything else works without.
"use strict";
(() => {
  const EVERY = 2000;
  const html = document.documentElement;
  html.dataset.faults = "0";
  const fault = () => { html.dataset.faults = String(Number(html.dataset.faults) + 1); };
  for (const name of ["error", "unhandledrejection"]) window.addEventListener(name, fault);
  document.addEventListener("securitypolicyviolation", fault);

  // Times are local, with UTC beside.
  const local = (root) => {
    for (const time of root.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      if (time.querySelector(".utc") || Number.isNaN(at.getTime())) continue;
      const now = new Date();
      const today = at.toDateString() === now.toDateString();
      const utcToday = today && at.toISOString().slice(0, 10) === now.toISOString().slice(0, 10);
      const utc = Object.assign(document.createElement("span"), { className: "utc" });
      utc.textContent = utcToday ? time.textContent.slice(11) : time.textContent;
      time.replaceChildren(today ? at.toLocaleTimeString() : at.toLocaleString(), " ", utc);
    }
  };
  local(document);

  // Below the path of a proxy, taskd does not know its address, but the browser does.
  const { address, root: way } = html.dataset;
  const base = new URL(`${way}..`, location.href).href.replace(/\/$/, "");
  const named = (root) => {
    for (const command of base === address ? [] : root.querySelectorAll("pre:not(.payload)"))
      command.textContent = command.textContent.replaceAll(address, base);
  };
  named(document);

  // A form that asks for a text sends nothing else; the server compares it, too.
  for (const input of document.querySelectorAll("input[data-typed]")) {
    const button = input.form.querySelector("button[type=submit]");
    const compare = () => { button.disabled = input.value.trim() !== input.dataset.typed; };
    input.addEventListener("input", compare);
    compare();
  }

  const frame = document.querySelector("#frame[data-live]");
  const mark = document.getElementById("fresh");
  if (!frame || !mark || !window.Idiomorph) return;

  const says = document.createElement("span");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Pause";
  mark.removeAttribute("role");
  mark.append(says, button);

  let version = "";
  let paused = false;
  let asking = false;
  let heard = Date.now();
  // The server says how long a frame rests that costs it much.
  let after = EVERY;
  let lost = false;

  const show = () => {
    const quiet = Math.round((Date.now() - heard) / 1000);
    const text = paused ? "paused" : lost ? "lost: trying again" : quiet > after / 1000 + 4 ? `no news for ${quiet} s` : "live";
    if (says.textContent !== text) says.textContent = text;
    frame.classList.toggle("old", lost || (!paused && quiet > after / 1000 + 28));
  };

  // What is selected in the frame, as a function that selects it again: a row that moves loses it.
  const selected = () => {
    const selection = getSelection();
    const { anchorNode, anchorOffset, focusNode, focusOffset, isCollapsed } = selection;
    const fits = (node, offset) =>
      frame.contains(node) && offset <= (node.data ?? node.childNodes).length;
    return () => {
      if (isCollapsed || selection.toString()) return;
      if (!fits(anchorNode, anchorOffset) || !fits(focusNode, focusOffset)) return;
      selection.setBaseAndExtent(anchorNode, anchorOffset, focusNode, focusOffset);
    };
  };

  // What is wrong is announced once, however its numbers change.
  const alerts = document.getElementById("alerts");
  let known = null;
  const announce = () => {
    const banners = [...frame.querySelectorAll("[data-alert]")];
    const fresh = banners.filter((banner) => known && !known.has(banner.dataset.alert));
    known = new Set(banners.map((banner) => banner.dataset.alert));
    if (alerts && fresh.length) alerts.textContent = fresh.map((banner) => banner.textContent).join(" ");
  };
  announce();

  const merge = (text) => {
    const again = selected();
    const fresh = new DOMParser().parseFromString(text, "text/html").body;
    local(fresh);
    named(fresh);
    window.Idiomorph.morph(frame, fresh.childNodes, {
      morphStyle: "innerHTML",
      ignoreActiveValue: true,
      callbacks: {
        // What the reader opened stays open, and a tooltip stays.
        beforeAttributeUpdated: (name, element) => !(name === "open" && element.tagName === "DETAILS"),
      },
    });
    again();
    announce();
  };

  let next = 0;
  const ask = async () => {
    if (asking || paused || document.hidden || Date.now() < next) return;
    asking = true;
    try {
      const answer = await fetch(location.href, {
        headers: { "taskd-frame": version || "none" },
        redirect: "error",
        signal: AbortSignal.timeout(30000),
      });
      if (answer.status === 401) { location.reload(); return; }
      lost = answer.status !== 200 && answer.status !== 204;
      // A pause that began meanwhile keeps what is shown.
      if (answer.status === 200 && !paused) {
        merge(await answer.text());
        version = answer.headers.get("taskd-frame") || "";
      }
      if (!lost) heard = Date.now();
      if (!lost) after = Number(answer.headers.get("taskd-frame-after")) || EVERY;
      if (!lost && after > EVERY) next = heard + after - EVERY / 2;
    } catch {
      lost = true;
    } finally {
      asking = false;
      if (lost) after = EVERY;
      show();
    }
  };

  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Go on" : "Pause";
    show();
    ask();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { heard = Date.now(); ask(); } });
  setInterval(ask, EVERY);
  setInterval(show, 1000);
  show();
})();
