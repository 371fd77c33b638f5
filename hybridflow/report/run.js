"use strict";
// Sections of one run: curves, seconds, timeline, memory, mismatch, samples.

const PAGE = 20, TOKENS_SHOWN = 1500;

function show(data) {
  const m = data.metrics;
  $("main").append(make("div", { class: "tiles" }, ...data.tiles.map(([name, value]) => make("div", { class: "tile" }, make("b", { text: value }), make("span", { text: name })))));
  section("curves", "Learning", "The reward of sampled answers should rise. Accuracy is that on prompts never trained on. The loss of policy-gradient methods hovers around 0 and says little; entropy that falls to 0 means that the model has stopped exploring.", charts(
    lineChart("Reward", "mean over the answers of each step", pick(m, ["reward/mean", "reward/solved"])),
    lineChart("Accuracy", "share of held-out prompts solved", pick(m, ["evaluate/accuracy"])),
    lineChart("Loss", "what the update minimises", pick(m, ["actor/loss", "critic/loss"])),
    lineChart("Entropy", "how undecided the policy is, per token", pick(m, ["actor/entropy"])),
    lineChart("Gradient norm", "before clipping", pick(m, ["actor/grad_norm", "critic/grad_norm"])),
    lineChart("Response length", "tokens; cut is the share that met the limit", pick(m, ["response/length", "response/longest"])),
    lineChart("KL", "distance to the reference, and of an update to the policy before it", pick(m, ["actor/kl", "reward/kl", "actor/approx_kl"]))));
  seconds(m);
  timeline(data.trace);
  memory(m);
  mismatch(m, data.samples);
  samples(data.samples, data.tokens);
  section("all", "Every metric", "Each metric of metrics.jsonl by name, with its last value.", everyMetric(m));
  section("config", "Configuration", "The resolved settings of this run.", make("pre", { class: "box scroll", text: data.config }));
}

function seconds(m) {
  const names = starting(m, "time/", ["time/step"]), training = m.steps.map((s, i) => i).filter((i) => m.steps[i] > 0);
  const sums = names.map((name) => [name.slice(5), training.reduce((sum, i) => sum + (m.series[name][i] || 0), 0)]).filter((p) => p[1] > 0).sort((a, b) => b[1] - a[1]);
  const parts = sums.map(([name, value]) => ({ name, value: value / training.length }));
  section("seconds", "Where the time goes", "Seconds of a training step by the driver's timers. `other` is what no timer covers: the engine's own overhead.", parts.length ? charts(
    barChart("Mean step", "seconds by phase, over the steps of this page", [{ name: "a step", parts }], "s"),
    lineChart("By step", "seconds of each phase", sums.slice(0, 7).map(([name]) => ({ name, x: m.steps, y: m.series[`time/${name}`] }))),
    lineChart("Tokens per second", "prompts and responses over whole steps", pick(m, ["throughput/tokens_per_second", "throughput/response_tokens_per_second"]))) : null);
}

function timeline(trace) {
  const steps = [...new Set(trace.step)];
  if (!steps.length) return;
  const place = make("div"), idle = make("p", { class: "dim" });
  const select = make("select", { id: "gantt-step", "aria-label": "step" }, ...steps.map((s) => make("option", { value: s, text: `step ${s}` })));
  const draw = () => {
    const chosen = Number(select.value), events = [];
    trace.step.forEach((s, i) => { if (s === chosen) events.push([trace.names[trace.name[i]], trace.processes[trace.process[i]], trace.roles[trace.role[i]], trace.begin[i], trace.length[i], trace.peak[i]]); });
    place.replaceChildren(gantt(events));
    idle.textContent = "Idle, of the time that the driver's timers cover: " + Object.entries(trace.idle[chosen] || {}).map(([p, share]) => `${p} ${(100 * share).toFixed(0)} %`).join(", ");
  };
  select.value = steps[steps.length - 1];
  select.addEventListener("change", draw);
  draw();
  section("timeline", "Timeline of a step", "Each row is a process, each bar a call as that process measured it; gaps are idle time. The driver's row shows its timers. trace.json has every step, for ui.perfetto.dev.", make("div", { class: "controls" }, select), place, idle);
}

function memory(m) {
  const last = (name) => { const y = m.series[name]; for (let i = y.length - 1; i >= 0; i--) if (y[i] !== null) return y[i]; return null; };
  const rows = ["training", "generation"].flatMap((phase) => starting(m, `phase/${phase}/`).filter((n) => n.endsWith("/gb")).map((n) => [phase, n.split("/")[2], last(n), last(n.replace(/gb$/, "seconds"))]));
  const ends = ["training", "generation"].filter((p) => m.series[`phase/${p}/after_gb`]).map((p) => [p, last(`phase/${p}/before_gb`), last(`phase/${p}/after_gb`), last(`phase/${p}/seconds`)]);
  section("memory", "Memory by phase", "Roles that share a device take turns in its memory. Peaks are what a process held at most during a role's calls, on the fullest rank.", charts(
    lineChart("Peak by role", "GiB, libraries included", starting(m, "memory/").filter((n) => n.endsWith("_peak_gb")).map((name) => ({ name: name.slice(7, -8), x: m.steps, y: m.series[name] }))),
    lineChart("In use when generation begins", "GiB", pick(m, ["memory/rss_gb", "memory/allocated_gb", "memory/reserved_gb"]))),
    ends.length ? make("div", { class: "box" }, tableOf(["entering", "GiB before", "GiB after", "seconds"], ends)) : null,
    rows.length ? make("div", { class: "box" }, tableOf(["entering", "part", "GiB gained", "seconds"], rows)) : null);
}

function mismatch(m, s) {
  const prefix = "rollout_vs_trainer/";
  section("mismatch", "Rollout against trainer", "The engine that samples and the one that trains compute the same log-probabilities in different ways. Differences near the precision of the dtype are healthy; growing ones mean that training is off-policy.", charts(
    lineChart("Difference of log-probabilities", "largest and mean |rollout - trainer| of a token, logarithmic", pick(m, [prefix + "max_diff", prefix + "mean_diff"]), { log: true }),
    lineChart("Distance of the policies", "KL (k3) and chi-square, logarithmic", pick(m, [prefix + "k3", prefix + "chi_square"]), { log: true }),
    lineChart("Effective sample size", "1 where the policies are the same", pick(m, [prefix + "ess", prefix + "ratio_mean"])),
    scatter(s)));
}

function scatter(s) {
  const points = [];
  for (let i = s.step.length - 1; i >= 0 && points.length < 8000; i--) {
    const ours = s.log_probs[i], theirs = s.trainer_log_probs[i];
    if (ours && theirs) for (let j = 0; j < Math.min(ours.length, theirs.length); j++) points.push([ours[j], theirs[j]]);
  }
  if (!points.length) return null;
  const w = 520, h = 230, canvas = make("canvas", { width: w, height: h, style: "width:100%", "aria-label": "rollout against trainer log-probabilities" });
  let low = 0;
  for (const [a, b] of points) low = Math.min(low, a, b);
  const context = canvas.getContext("2d"), at = (v) => (v - low) / (-low || 1);
  context.strokeStyle = "#8888"; context.beginPath(); context.moveTo(0, h); context.lineTo(w, 0); context.stroke();
  context.fillStyle = "#3b82f680";
  for (const [a, b] of points) context.fillRect(at(a) * (w - 3), (1 - at(b)) * (h - 3), 2.5, 2.5);
  return make("div", { class: "chart" }, make("h3", { text: "Token by token" }), make("small", { text: `trainer (up) against rollout (right) log-probability of ${points.length} tokens, from ${short(low)} to 0; the line is equality` }), canvas);
}

function samples(s, tokens) {
  const count = s.step.length;
  if (!count) return;
  const texts = s.prompt.map((prompt, i) => `${prompt}\n${s.response[i]}\n${s.ground_truth[i] ?? ""}`.toLowerCase());
  const search = make("input", { type: "search", id: "search", placeholder: "search prompts and responses", "aria-label": "search" });
  const option = (value, text) => make("option", { value, text });
  const step = make("select", { id: "step", "aria-label": "step" }, option("", "every step"), ...[...new Set(s.step)].map((n) => option(n, `step ${n}`)));
  const tag = make("select", { id: "tag", "aria-label": "kind" }, option("", "training and evaluation"), ...[...new Set(s.tag)].map((t) => option(t, t)));
  const solved = make("select", { id: "solved", "aria-label": "solved" }, option("", "solved or not"), option("true", "solved"), option("false", "not solved"));
  const state = { page: 0, key: null, down: true, found: [] };
  const counter = make("span", { id: "count", class: "dim" }), back = make("button", { id: "back", text: "‹ back" }), next = make("button", { id: "next", text: "next ›" });
  const body = make("tbody", { id: "rows" }), detail = make("div", { id: "detail" });
  const columns = [["step", "step"], ["kind", "tag"], ["prompt", "prompt"], ["response", "response"], ["truth", "ground_truth"], ["reward", "reward"], ["solved", "solved"], ["tokens", "length"]];
  const head = make("tr", {}, ...columns.map(([name, key]) => make("th", { "data-key": key, text: name, class: ["step", "reward", "length"].includes(key) ? "number" : null, onclick: () => { state.down = state.key === key ? !state.down : true; state.key = key; apply(); } })));

  function apply() {
    const words = search.value.toLowerCase(), wanted = [];
    for (let i = 0; i < count; i++) {
      if (step.value !== "" && s.step[i] !== Number(step.value)) continue;
      if (tag.value !== "" && s.tag[i] !== tag.value) continue;
      if (solved.value !== "" && String(s.solved[i]) !== solved.value) continue;
      if (words && !texts[i].includes(words)) continue;
      wanted.push(i);
    }
    if (state.key) {
      const column = s[state.key], sign = state.down ? -1 : 1, value = (v) => (typeof v === "boolean" ? Number(v) : v);
      wanted.sort((a, b) => { const x = value(column[a]), y = value(column[b]); return x === y ? a - b : x === null ? 1 : y === null ? -1 : (x < y ? -1 : 1) * sign; });
    }
    state.found = wanted; state.page = 0; draw();
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(state.found.length / PAGE)), from = state.page * PAGE;
    counter.textContent = `${state.found.length} of ${count} samples, page ${state.page + 1} of ${pages}`;
    back.disabled = state.page === 0; next.disabled = state.page + 1 >= pages;
    body.replaceChildren(...state.found.slice(from, from + PAGE).map((i) => {
      const row = make("tr", { tabindex: 0 }, ...columns.map(([, key]) => {
        const v = s[key][i], text = ["prompt", "response", "ground_truth"].includes(key);
        return make("td", { class: text ? "text" : typeof v === "number" ? "number" : null, text: v === null || v === undefined ? "–" : typeof v === "number" ? short(v) : String(v) });
      }));
      const open = () => { for (const other of body.children) other.classList.remove("chosen"); row.classList.add("chosen"); detail.replaceChildren(sample(s, tokens, i)); };
      row.addEventListener("click", open);
      row.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
      return row;
    }));
  }

  search.addEventListener("input", apply);
  for (const control of [step, tag, solved]) control.addEventListener("change", apply);
  back.addEventListener("click", () => { state.page -= 1; draw(); });
  next.addEventListener("click", () => { state.page += 1; draw(); });
  apply();
  section("samples", "Samples", "Answers the model gave, newest step last. Click a row for its tokens: what each one cost and what it was taught." + (s.left_out ? ` ${s.left_out}` : ""),
    make("div", { class: "controls" }, search, step, tag, solved), make("div", { class: "controls" }, back, next, counter),
    make("div", { style: "overflow-x:auto" }, make("table", {}, make("thead", {}, head), body)), detail);
}

function sample(s, tokens, i) {
  const box = make("div", { class: "box" }, make("b", { text: `Step ${s.step[i]}, ${s.tag[i]}: reward ${short(s.reward[i])}, ${s.finish_reason[i] ?? ""}, weights of version ${s.version[i] ?? "–"}` }));
  box.append(make("div", { class: "dim", text: "prompt" }), make("pre", { text: s.prompt[i] }), make("div", { class: "dim", text: "response" }), make("pre", { text: s.response[i] }));
  const ids = s.ids[i];
  if (!ids) { box.append(make("p", { class: "dim", text: "Its tokens are not on this page; rollouts.jsonl has them." })); return box; }
  const log_probs = s.log_probs[i], trainer = s.trainer_log_probs[i], mask = s.mask[i], advantages = s.advantages[i];
  const advantage = (j) => (Array.isArray(advantages) ? advantages[j] : advantages);
  const word = (id) => tokens[id] ?? `#${id}`, shown = Math.min(ids.length, TOKENS_SHOWN);
  const line = make("div", { class: "tokens" }), rows = [];
  for (let j = 0; j < shown; j++) {
    const chance = log_probs ? Math.exp(log_probs[j]) : 1, trained = !mask || mask[j] === 1;
    const piece = make("span", { class: trained ? null : "masked", text: word(ids[j]), style: `background:rgba(220,80,40,${(0.6 * (1 - chance)).toFixed(2)})` });
    hover(piece, `token ${ids[j]}\nlog_prob ${short(log_probs?.[j])} (probability ${short(chance)})\ntrainer ${short(trainer?.[j])}\nadvantage ${short(advantage(j))}${trained ? "" : "\nmasked: not trained on"}`);
    line.append(piece);
    rows.push([j, word(ids[j]), ids[j], log_probs?.[j] ?? null, trainer?.[j] ?? null, trained ? "yes" : "no", advantage(j) ?? null]);
  }
  box.append(make("div", { class: "dim", text: "tokens: the redder, the less likely; crossed out ones are masked" }), line);
  box.append(make("div", { class: "scroll" }, tableOf(["#", "token", "id", "log_prob (rollout)", "log_prob (trainer)", "trained on", "advantage"], rows)));
  if (shown < ids.length) box.append(make("p", { class: "dim", text: `${ids.length - shown} more tokens are not shown.` }));
  return box;
}

function everyMetric(m) {
  const last = (y) => { for (let i = y.length - 1; i >= 0; i--) if (y[i] !== null) return y[i]; return null; };
  const place = make("div", { class: "charts" });
  const select = make("select", { id: "metric", "aria-label": "metric" }, ...Object.keys(m.series).sort().map((name) => make("option", { value: name, text: `${name}  (${short(last(m.series[name]))})` })));
  const draw = () => place.replaceChildren(...[lineChart(select.value, "", pick(m, [select.value]))].filter(Boolean));
  select.addEventListener("change", draw);
  draw();
  return make("div", {}, make("div", { class: "controls" }, select), place);
}
