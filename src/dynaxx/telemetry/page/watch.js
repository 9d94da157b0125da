// SPDX-License-Identifier: Apache-2.0
"use strict";
// Draws /state.json repeatedly. All content is set as text, never as markup.

const GUARD = ["quiet", "warns", "widened the budget", "runs dense"];
const LIMITS = { recall: 0.9, output_error: 0.1, drift: 1 };
const element = (id) => document.getElementById(id);

function make(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function number(value, unit = "", least = 1) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return `0 ${unit}`.trim();
  const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]];
  const [step, prefix] = steps.find(([size]) => Math.abs(value) >= size || size <= least);
  const scaled = value / step;
  const digits = Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)} ${prefix}${unit}`.trim();
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return number(seconds, "s", 1e-6);
}

const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
const plain = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

function curve(values, limit) {
  const known = values.filter((value) => value !== null);
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  if (known.length < 2) return svg;
  const all = limit === undefined ? known : [...known, limit];
  const low = Math.min(...all), high = Math.max(...all), span = high - low || Math.abs(high) || 1;
  const y = (value) => (high === low ? 50 : 96 - (92 * (value - low)) / span);
  if (limit !== undefined) {
    const line = document.createElementNS(space, "line");
    for (const [name, value] of [["x1", 0], ["x2", 100], ["y1", y(limit)], ["y2", y(limit)]]) line.setAttribute(name, value);
    svg.append(line);
  }
  let drawing = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null) { pen = "M"; return; }
    drawing += `${pen}${((100 * i) / (values.length - 1)).toFixed(2)} ${y(value).toFixed(2)}`;
    pen = "L";
  });
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", drawing);
  svg.append(path);
  return svg;
}

function chart(title, text, values, limit) {
  const card = make("div", undefined, "card chart");
  card.append(make("span", title, "quiet"), make("b", text), curve(values, limit));
  return card;
}

function facts(title, rows) {
  const card = make("div", undefined, "card"), list = make("dl");
  for (const [name, value] of rows) list.append(make("dt", name), make("dd", value));
  card.append(make("h2", title), list);
  return card;
}

function drawConcerns(concerns) {
  const items = concerns.map((concern) => make("li", concern.text, concern.level === "bad" ? "bad" : "warn"));
  if (!items.length) items.push(make("li", "no concerns", "good"));
  const list = element("concerns");
  const same = list.children.length === items.length && items.every((item, i) => item.isEqualNode(list.children[i]));
  if (!same) list.replaceChildren(...items); // a screen reader announces changes only
}

function drawCharts(seen, history) {
  const series = (name) => history.map((point) => point[name]);
  element("charts").replaceChildren(
    chart("tokens per second", number(sum(seen.tokens_per_second)), series("tokens_per_second")),
    chart("prefill, p95", duration(seen.request_seconds.p95), series("request_seconds_p95")),
    chart("density", share(seen.density), series("density")),
    chart("recall", share(seen.recall), series("recall"), seen.recall === null ? undefined : LIMITS.recall),
  );
}

function drawFacts(seen) {
  const total = seen.window_seconds ? sum(seen.requests_per_second) : null, sparse = seen.requests_per_second.sparse || 0;
  const counts = (found) => Object.entries(found).sort((a, b) => b[1] - a[1]).slice(0, 6).map(([k, v]) => [k, String(v)]);
  const cards = [
    facts("Traffic", [
      ["requests", total === null ? "–" : `${plain(total)} /s`],
      ["sparse requests", total ? share(sparse / total) : "–"],
      ["prefill, median", duration(seen.request_seconds.p50)],
      ["key-value cache", number(seen.kv_cache_bytes, "B")],
    ]),
    facts("Attention", [
      ["time per call", duration(seen.attention_seconds)],
      ["achieved", number(seen.flops_per_second, "FLOP/s")],
      ["memory traffic", number(seen.bytes_per_second, "B/s")],
      ["selection", share(seen.selection_share)],
      ["overlap", share(seen.overlap)],
    ]),
    facts("Faithful", [
      ["output error", share(seen.output_error)],
      ["next-token KL", number(seen.next_token_kl, "nat", 1e-6)],
      ["drift / limit", share(seen.drift)],
      ["fall back", share(seen.fallback_share)],
    ]),
    facts("In force", [
      ["kill switch", seen.kill_switch ? `on ${seen.killed_by}`.trim() : "off"],
      ["policy", seen.policy.digest ? seen.policy.digest.slice(0, 12) : "–"],
      ["rollout", share(seen.rollout)],
      ["guard", GUARD[seen.guard_level]],
    ]),
  ];
  if (sum(seen.dense_calls)) cards.push(facts("Dense calls", counts(seen.dense_calls)));
  if (sum(seen.fallbacks)) cards.push(facts("Fallbacks", counts(seen.fallbacks)));
  element("facts").replaceChildren(...cards);
}

function drawLayers(layers) {
  element("layers").hidden = !layers.length;
  const cell = (value, text, wrong) => make("td", text(value), value !== null && wrong(value) ? "bad" : "");
  const rows = layers.map((one) => {
    const row = make("tr"), name = make("th", String(one.layer));
    name.scope = "row";
    row.append(name,
      cell(one.density, share, () => false),
      cell(one.recall, share, (value) => value < LIMITS.recall),
      cell(one.output_error, share, (value) => value > LIMITS.output_error),
      cell(one.drift, share, (value) => value >= LIMITS.drift));
    return row;
  });
  document.querySelector("#layers tbody").replaceChildren(...rows);
}

function drawEvents(events) {
  element("events").hidden = !events.length;
  const items = [...events].reverse().map((event) => {
    const item = make("li"), at = new Date(1000 * event.time);
    const stamp = make("time", at.toLocaleTimeString());
    stamp.dateTime = at.toISOString();
    item.append(stamp, make("span", event.text));
    return item;
  });
  document.querySelector("#events ol").replaceChildren(...items);
}

function draw(state) {
  const seen = state.overview;
  element("model").textContent = seen.models.join(", ") || "a process";
  const about = [seen.source];
  if (seen.uptime_seconds !== null) about.push(`up ${duration(seen.uptime_seconds)}`);
  if (seen.window_seconds) about.push(`last ${duration(seen.window_seconds)}`);
  element("about").textContent = about.join(" · ");
  drawConcerns(seen.concerns);
  drawCharts(seen, state.history);
  drawFacts(seen);
  drawLayers(seen.layers);
  drawEvents(state.events);
}

async function turn() {
  let wait = 2;
  try {
    const answer = await fetch("state.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`state.json responds ${answer.status}`);
    const state = await answer.json();
    wait = Math.max(0.25, state.interval);
    draw(state);
  } catch (error) {
    drawConcerns([{ level: "bad", text: `dynaxx watch does not respond: ${error.message}` }]);
  }
  setTimeout(turn, 1000 * wait);
}

turn();
