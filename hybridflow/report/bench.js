"use strict";
// Sections of a sweep: one row a point, bars of seconds, throughput against devices, one step's timeline.

const FIXED = ["point", "status", "driver", "error", "wall_seconds", "devices", "mfu", "sync_bytes", "sync_seconds", "transition_seconds"];

function show(data) {
  const done = data.rows.filter((row) => row.status === "done"), failed = data.rows.filter((row) => row.status !== "done");
  const keys = [...new Set(data.rows.flatMap((row) => Object.keys(row)))];
  const swept = keys.filter((k) => !FIXED.includes(k) && !/^(seconds|idle|peak_gb)\/|^step_seconds|^tokens_per/.test(k));
  const label = (row, without = () => false) => [row.driver.replace(/^.*\//, ""), ...swept.filter((k) => row[k] !== undefined && !without(k)).map((k) => `${k}=${row[k]}`)].join("  ");
  const measured = ["devices", "tokens_per_second", "tokens_per_second_per_device", "step_seconds", "transition_seconds", "sync_bytes", "mfu", ...keys.filter((k) => k.startsWith("idle/"))].filter((k) => keys.includes(k));
  const value = (v) => (v === undefined ? null : v);
  section("points", "Points", `${done.length} measured, ${failed.length} failed. Means over the measured steps of each run; results.csv and results.parquet have every number and the resolved settings.`,
    make("div", { style: "overflow-x:auto" }, tableOf(["driver", ...swept, ...measured], done.map((row) => [row.driver.replace(/^.*\//, ""), ...swept.map((k) => value(row[k])), ...measured.map((k) => value(row[k]))]))));
  section("seconds", "Seconds by phase", "The mean step of each point, by the driver's timers; bars share one scale.",
    barChart("Mean step", "seconds", done.map((row) => ({ name: label(row), parts: keys.filter((k) => k.startsWith("seconds/") && row[k] > 0).map((k) => ({ name: k.slice(8), value: row[k] })) })), "s"));
  const groups = new Map();
  for (const row of done) {
    const name = label(row, (k) => k === "placement" || k.startsWith("pools."));
    groups.set(name, [...(groups.get(name) || []), row]);
  }
  const series = (key) => [...groups].map(([name, rows]) => ({ name, x: rows.map((r) => r.devices), y: rows.map((r) => r[key]) })).map((s) => {
    const order = s.x.map((_, i) => i).sort((a, b) => s.x[a] - s.x[b]);
    return { name: s.name, x: order.map((i) => s.x[i]), y: order.map((i) => s.y[i]) };
  });
  section("throughput", "Throughput against devices", "Points that differ in nothing but pools and placement share a line.", charts(
    lineChart("Tokens per second", "prompts and responses over whole steps", series("tokens_per_second"), { xLabel: "devices" }),
    lineChart("Tokens per second and device", "flat is perfect scaling", series("tokens_per_second_per_device"), { xLabel: "devices" })));
  const shown = done.filter((row) => data.timelines[row.point] && data.timelines[row.point].step.length);
  if (shown.length) {
    const place = make("div"), select = make("select", { id: "gantt-point", "aria-label": "point" }, ...shown.map((row) => make("option", { value: row.point, text: label(row) })));
    const draw = () => {
      const t = data.timelines[select.value];
      place.replaceChildren(gantt(t.step.map((_, i) => [t.names[t.name[i]], t.processes[t.process[i]], t.roles[t.role[i]], t.begin[i], t.length[i], t.peak[i]])));
    };
    select.addEventListener("change", draw);
    draw();
    section("timeline", "Timeline of a step", "The last step but one of a point: each row is a process of a pool, each bar a call as that process measured it.", make("div", { class: "controls" }, select), place);
  }
  const peaks = keys.filter((k) => k.startsWith("peak_gb/") && !k.includes(" rank "));
  section("memory", "Peak memory", "GiB that a process held at most during a role's calls.", done.length ? make("div", { class: "box" }, tableOf(["point", ...peaks.map((k) => k.slice(8))], done.map((row) => [label(row), ...peaks.map((k) => value(row[k]))]))) : null);
  section("failed", "Failed points", "What each one said last.", failed.length ? make("div", { class: "box" }, tableOf(["point", "error"], failed.map((row) => [label(row), row.error]))) : null);
}
