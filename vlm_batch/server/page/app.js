"use strict";

const SAMPLES = 120; // half a second each: one minute
const POLL_MS = 500;
const find = (id) => document.getElementById(id);
const pictures = []; // {name, url} with data URLs
const running = new Set(); // AbortControllers
const history = [];

// ---- the server ----

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (response.status === 401) find("key-row").hidden = false;
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The payloads of server-sent events, parsed. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// ---- the batch ----

async function poll() {
  if (!document.hidden) {
    try {
      const now = await (await ask("/stats")).json();
      find("model").textContent = `${now.model}: ${now.status}`;
      const before = history.at(-1);
      const batch = now.batch ?? {};
      history.push({
        decoding: batch.decoding ?? 0,
        prefilling: batch.prefilling ?? 0,
        waiting: (batch.waiting ?? 0) + (batch.queued ?? 0),
        kv: batch.kv_bytes ?? 0,
        cached: batch.cached_tokens ?? 0,
        generated: batch.generated_tokens ?? 0,
        at: performance.now(),
      });
      const last = history.at(-1);
      last.speed = before ? Math.max(0, ((last.generated - before.generated) * 1000) / (last.at - before.at)) : 0;
      last.hits = before ? Math.max(0, last.cached - before.cached) : 0;
      if (history.length > SAMPLES) history.shift();
      draw();
    } catch (error) {
      find("model").textContent = error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}

function draw() {
  const last = history.at(-1);
  bars("rows", ["decoding", "prefilling", "waiting"]);
  bars("speed", ["speed"]);
  bars("kv", ["kv"]);
  bars("cache", ["hits"]);
  find("rows-now").textContent = `${last.decoding} + ${last.prefilling} + ${last.waiting}`;
  find("speed-now").textContent = last.speed.toFixed(0);
  find("kv-now").textContent = bytes(last.kv);
  find("cache-now").textContent = last.cached.toLocaleString();
}

/** Stacked bars, one for each sample, newest at the right. */
function bars(id, names) {
  const top = Math.max(1e-9, ...history.map((one) => names.reduce((sum, name) => sum + one[name], 0)));
  const shapes = [];
  history.forEach((one, index) => {
    let y = 32;
    const x = SAMPLES - history.length + index;
    for (const name of names) {
      const height = (31 * one[name]) / top;
      if (!height) continue;
      y -= height;
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const kind = names.length > 1 ? name : "line";
      for (const [key, value] of Object.entries({ x, y, width: 1, height, class: kind })) bar.setAttribute(key, value);
      shapes.push(bar);
    }
  });
  find(id).replaceChildren(...shapes);
}

function bytes(count) {
  const units = ["B", "KB", "MB", "GB"];
  let unit = 0;
  while (count >= 1000 && unit < 3) [count, unit] = [count / 1000, unit + 1];
  return `${count.toFixed(unit && count < 100 ? 1 : 0)} ${units[unit]}`;
}

// ---- pictures ----

function addFiles(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.onload = () => {
      pictures.push({ name: file.name || "pasted picture", url: reader.result });
      showPictures();
    };
    reader.readAsDataURL(file);
  }
}

function showPictures() {
  find("pictures").replaceChildren(
    ...pictures.map((picture, index) => {
      const item = document.createElement("li");
      const remove = element("button", "×");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${picture.name}`);
      remove.onclick = () => {
        pictures.splice(index, 1);
        showPictures();
      };
      item.append(image(picture), remove);
      return item;
    }),
  );
}

function image(picture) {
  const shown = document.createElement("img");
  shown.src = picture.url;
  shown.alt = picture.name;
  return shown;
}

function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = name;
  return made;
}

// ---- questions ----

function send() {
  find("problem").textContent = "";
  const question = find("question").value.trim();
  if (!question) return find("question").focus();
  const groups = find("each").checked && pictures.length ? pictures.map((one) => [one]) : [[...pictures]];
  const times = Math.max(1, Number(find("times").value) || 1);
  for (const group of groups) for (let time = 0; time < times; time += 1) stream(question, group);
}

async function stream(question, group) {
  const card = makeCard(question, group);
  const control = new AbortController();
  running.add(control);
  find("stop").disabled = false;
  card.stop.onclick = () => control.abort();
  const began = performance.now();
  const seen = { first: 0, last: 0, tokens: 0, finish: "" };
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: control.signal,
      body: JSON.stringify(body(question, group)),
    });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      take(event, card, seen);
      card.facts.textContent = facts(seen, began);
    }
    card.box.classList.add("done");
  } catch (error) {
    const stopped = error.name === "AbortError";
    card.box.classList.add(stopped ? "stopped" : "failed");
    card.facts.textContent = stopped ? `stopped · ${facts(seen, began)}` : error.message;
    if (!stopped) find("problem").textContent = error.message;
  } finally {
    card.box.classList.remove("running");
    card.stop.remove();
    running.delete(control);
    find("stop").disabled = running.size === 0;
  }
}

function body(question, group) {
  const images = group.map((picture) => ({ type: "image_url", image_url: { url: picture.url } }));
  return {
    messages: [{ role: "user", content: [...images, { type: "text", text: question }] }],
    max_tokens: Number(find("max-tokens").value) || 256,
    temperature: Number(find("temperature").value) || 0,
    stream: true,
    stream_options: { include_usage: true },
  };
}

function take(event, card, seen) {
  if (event.usage) seen.tokens = event.usage.completion_tokens;
  for (const choice of event.choices) {
    const text = choice.delta.content ?? "";
    const thought = choice.delta.reasoning_content ?? "";
    if (choice.finish_reason) seen.finish = choice.finish_reason;
    if (!text && !thought) continue;
    seen.last = performance.now();
    seen.first ||= seen.last;
    seen.tokens += 1;
    card.text.append(text);
    card.thought.append(thought);
  }
}

function facts(seen, began) {
  if (!seen.first) return "waiting";
  const seconds = (seen.last - seen.first) / 1000;
  const speed = seconds > 0 ? `${((seen.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return [`first token after ${((seen.first - began) / 1000).toFixed(2)} s`, `${seen.tokens} tokens`, speed, seen.finish]
    .filter(Boolean)
    .join(" · ");
}

function makeCard(question, group) {
  const box = element("article", "", "answer running");
  const text = element("p", "", "text");
  const thought = element("p", "", "thought");
  const line = element("div", "", "facts");
  const about = element("span", "waiting");
  const stop = element("button", "Stop");
  stop.type = "button";
  line.append(about, stop);
  box.append(element("h2", question), ...group.map(image), thought, text, line);
  find("answers").prepend(box);
  return { box, text, thought, facts: about, stop };
}

function stopAll() {
  for (const control of running) control.abort();
}

// ---- wiring ----

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("files").addEventListener("change", (event) => {
  addFiles(event.target.files);
  event.target.value = "";
});
find("stop").addEventListener("click", stopAll);
find("clear").addEventListener("click", () => find("answers").replaceChildren());
find("key").addEventListener("change", (event) => sessionStorage.setItem("key", event.target.value.trim()));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  if (event.key === "Escape") stopAll();
});
document.addEventListener("paste", (event) => addFiles(event.clipboardData.files));
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    find("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) find("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  find("drop").classList.remove("over");
  addFiles(event.dataTransfer.files);
});
poll();
