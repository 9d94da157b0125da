// SPDX-License-Identifier: Apache-2.0
"use strict";
// Draws /state.json repeatedly. All content is set as text, never as markup.

const element = (id) => document.getElementById(id);

function make(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function curve(values, limit) {
  const known = values.filter((value) => value !== null);
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  if (known.length < 2) return svg;
  const all = limit === null ? known : [...known, limit];
  const low = Math.min(...all), high = Math.max(...all), span = high - low || Math.abs(high) || 1;
  const y = (value) => (high === low ? 50 : 96 - (92 * (value - low)) / span);
  if (limit !== null) {
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

function chart({ title, text, values, limit }) {
  const card = make("div", undefined, "card chart");
  card.append(make("span", title, "quiet"), make("b", text), curve(values, limit));
  return card;
}

function facts(title, rows) {
  const card = make("div", undefined, "card"), list = make("dl");
  for (const [name, value] of Object.entries(rows)) list.append(make("dt", name), make("dd", value));
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

function drawLayers(layers) {
  element("layers").hidden = !layers.length;
  const rows = layers.map(([[layer], ...cells]) => {
    const row = make("tr"), name = make("th", layer);
    name.scope = "row";
    row.append(name, ...cells.map(([text, wrong]) => make("td", text, wrong ? "bad" : "")));
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
  element("model").textContent = state.model;
  element("about").textContent = state.about.join(" · ");
  drawConcerns(state.concerns);
  element("charts").replaceChildren(...state.charts.map(chart));
  element("facts").replaceChildren(...Object.entries(state.facts).map(([title, rows]) => facts(title, rows)));
  drawLayers(state.layers);
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
