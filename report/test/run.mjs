// Opens reports in a browser and uses them: every panel is present, every control works, the console stays empty.
//
//     SHARDWRIGHT=target/debug/shardwright node report/test/run.mjs [FOLDER FOR SCREENSHOTS]

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

const program = process.env.SHARDWRIGHT ?? "target/debug/shardwright";
const browserPath = process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const pictures = process.argv[2];
const folder = mkdtempSync(join(tmpdir(), "shardwright-report-"));
const PANELS = ["summary", "timeline", "where", "network", "roofline", "memory", "ops", "search"];

const shardwright = (...args) => execFileSync(program, args, { encoding: "utf8", maxBuffer: 1 << 28, stdio: ["ignore", "pipe", "pipe"] });

/** A graph with hostile names. */
const EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>";
const evilGraph = JSON.stringify({
  format: "shardwright-graph", version: 1, name: EVIL,
  tensors: [
    { name: "x", type: "f32[64,96]", role: "input", init: { normal: 1.0 } },
    { name: `w ${EVIL}`, type: "f32[96,32]", role: "parameter", init: { normal: 0.1 } },
    { name: `y ${EVIL}`, type: "f32[64,32]", role: "activation" },
  ],
  ops: [{ name: EVIL, op: { kind: "contract", spec: "mk,kn->mn" }, inputs: [0, 1], outputs: [2], layer: 0, phase: "forward" }],
  layers: [0], outputs: [2], gradients: [], carries: [],
});

let browser;
before(async () => {
  browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox"] });
});
after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true, force: true });
});

/** Plans, and opens the report. */
function open(name, args, options) {
  return openPage(name, ["plan", ...args, "-o", join(folder, `${name}.json`)], options);
}

/** Opens the page that a command writes; fails at the end if the page logged anything or made a request. */
async function openPage(name, args, options = {}) {
  const path = join(folder, `${name}.html`);
  const json = JSON.parse(shardwright(...args, "--report", path, "--json"));
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const complaints = [];
  page.on("console", (message) => complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => request.url().startsWith("file:") || complaints.push(`asks for ${request.url()}`));
  await page.goto(pathToFileURL(path).href);
  const paint = await page.evaluate(() => new Promise((done) => {
    const look = () => {
      const [entry] = performance.getEntriesByName("first-contentful-paint");
      if (entry) done(entry.startTime);
      else requestAnimationFrame(look);
    };
    look();
  }));
  await page.locator("main:not([aria-busy])").waitFor();
  // The answer is in the file before the data, and gives way to the page.
  assert.match(readFileSync(path, "utf8").slice(0, 60000), /<main id="first"><h1>/);
  assert.equal(await page.locator("#first").count(), 0);
  const data = JSON.parse(await page.locator("#data").textContent());
  return { page, json, data, paint, path, close: async () => { await context.close(); assert.deepEqual(complaints, []); } };
}

async function everyPanelIsThere(page, panels = PANELS) {
  for (const id of panels) {
    const box = await page.locator(`#${id}`).boundingBox();
    assert.ok(box && box.height > 80 && box.width > 600, `${id}: ${JSON.stringify(box)}`);
  }
  assert.ok((await page.locator("#timeline canvas").evaluate(painted)) > 500, "the timeline is drawn");
  assert.ok((await page.locator("#network .layer").count()) > 0);
  assert.ok((await page.locator("#memory path").count()) >= 2);
  await fits(page);
}

/** The page does not scroll sideways, and no chart label overlaps another or leaves the chart. */
async function fits(page) {
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(wide <= 0, `the page is ${wide} pixels too wide`);
  const overlaps = await page.locator(".chart").evaluateAll((charts) => charts.flatMap((chart) => {
    const frame = chart.getBoundingClientRect();
    const texts = [...chart.querySelectorAll("text")].map((own) => ({ text: own.textContent, box: own.getBoundingClientRect() }));
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
    return texts.flatMap((own, at) => [
      ...(own.box.left < frame.left - 1 || own.box.right > frame.right + 1 ? [`${own.text} leaves the chart`] : []),
      ...texts.slice(at + 1).filter((other) => !apart(own.box, other.box)).map((other) => `${own.text} lies on ${other.text}`),
    ]);
  }));
  assert.deepEqual(overlaps, []);
}

/** The memory panel shows the data of the devices with the largest peak. */
async function memoryIsTold(page, data) {
  const fullest = data.steps.map((step) => step.classes.reduce((a, b) => (b.peak_memory_bytes > a.peak_memory_bytes ? b : a)));
  const bars = page.locator("#memory .bars tr");
  // The page has one peak per plan: the stated one. What the simulated step does not fill is an allowance.
  const stated = data.steps.map((step) => (step.name === "plan" ? data.plan.peak_memory_bytes : data.difference?.peak_memory_bytes[0] ?? data.plan.baselines[step.name].peak_memory_bytes));
  assert.deepEqual(await bars.locator(".value").allTextContents(), stated.map(bytes));
  for (const [at, own] of fullest.entries()) {
    const allowance = stated[at] > own.peak_memory_bytes ? [{ kind: "allowance", bytes: stated[at] - own.peak_memory_bytes }] : [];
    assert.deepEqual(await bars.nth(at).locator(".bar span").evaluateAll((all) => all.map((part) => part.title)),
      [...own.peak.kinds, ...allowance].map(({ kind, bytes: held }) => `${kind}: ${bytes(held)}`));
    assert.equal(own.peak.kinds.reduce((sum, use) => sum + use.bytes, 0), own.peak_memory_bytes);
    const rows = await page.locator("#memory .figures").nth(at).locator("tbody tr").evaluateAll((all) => all.map((row) => [...row.cells].slice(0, 3).map((cell) => cell.textContent)));
    assert.deepEqual(rows, own.peak.largest.map((held) => [held.tensor, held.kind, bytes(held.bytes)]));
  }
}

/** The open drawer explains an op with the numbers of the data. */
async function explanationIsTold(page, data, op) {
  const explanation = data.explanations.find((own) => own.ops.includes(op));
  const change = (ps) => (ps === null ? "-" : ps === 0 ? "0" : `${ps > 0 ? "+" : "−"}${seconds(Math.abs(ps) / 1e12)}`);
  const total = (own) => own.compute_ps + own.inside_ps + own.neighbours_ps;
  const orZero = (ps) => (ps === 0 ? "0" : seconds(ps / 1e12));
  const rows = await page.locator(".explain tbody tr").evaluateAll((all) => all.map((row) => [...row.cells].map((cell) => cell.textContent)));
  assert.deepEqual(rows, explanation.options.map((own, at) => [
    own.config, orZero(own.compute_ps), orZero(own.inside_ps), orZero(own.neighbours_ps),
    at === 0 ? "chosen" : change(total(own) - total(explanation.options[0])),
    ...(explanation.reoptimised === null ? [] : [change(own.reoptimised_ps)]),
  ]));
}

/** Numbers as the page formats them. */
const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : value >= 1e-3 ? `${(value * 1e3).toFixed(2)} ms` : `${(value * 1e6).toFixed(1)} us`);
const bytes = (value) => (value >= 1e12 ? `${(value / 1e12).toFixed(2)} TB` : value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e3).toFixed(1)} kB`);

const rate = (value) => (value < 100 ? value.toFixed(2) : Math.round(value).toLocaleString("en-US"));

/** A baseline's name with its variant. */
const described = (name, cost) => {
  const notes = [cost.micro_batches > 1 && `${cost.micro_batches} micro-batches`, cost.recompute !== "off" && `recompute ${cost.recompute}`, !cost.fits && "does not fit"].filter(Boolean);
  return notes.length ? `${name} (${notes.join(", ")})` : name;
};

/** Values of the summary's tiles by their titles. */
async function tileTexts(page) {
  const pairs = await page.locator("#summary .tile").evaluateAll((all) => all.map((own) => [own.querySelector("dt").textContent, own.querySelector("strong").textContent]));
  return Object.fromEntries(pairs);
}

/** The number of non-empty pixels of a canvas. */
function painted(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 3; at < data.length; at += 4) if (data[at] > 0) count++;
  return count;
}

async function checkAxe(page) {
  await page.addScriptTag({ content: axe });
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const texts = found.violations.map((own) => `${own.id}: ${own.help}: ${own.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`);
  assert.deepEqual(texts, []);
}

async function picture(page, name) {
  if (pictures) await page.screenshot({ path: join(pictures, `${name}.png`), fullPage: true });
}

describe("reports", () => {
  test("VGG-16: all panels, the command line's numbers, and everything that one can do", async () => {
    const { page, json, data, close } = await open("vgg16", ["vgg16", "--machine", "p100x16", "--batch", "512", "--solver", "exact", "--memory", "none"]);
    await everyPanelIsThere(page);
    await picture(page, "vgg16-1280-light");

    // Numbers are those of --json.
    assert.deepEqual(data.plan, json);
    const simulated = JSON.parse(shardwright("simulate", join(folder, "vgg16.json"), "--json"));
    assert.equal(data.steps[0].step_ps / 1e12, simulated.step_seconds);
    assert.equal(data.steps[0].classes[0].peak_memory_bytes, simulated.devices[0].peak_memory_bytes);
    assert.equal(data.steps[0].moves.reduce((sum, move) => sum + move.bytes, 0), json.traffic_bytes);
    const tiles = await tileTexts(page);
    assert.equal(tiles["step time"], `${(json.simulated.step_seconds * 1e3).toFixed(2)} ms`);
    assert.equal(tiles["throughput per device"], `${rate(json.throughput.samples_per_second / json.devices)} samples/s`);
    assert.equal(tiles["MFU"], `${(json.throughput.mfu * 100).toFixed(1)}%`);
    assert.equal(tiles["optimality"], `within ${(json.overlap.gap * 100).toFixed(1)}%`);
    const [rival, rivalCost] = Object.entries(json.baselines).filter(([name, cost]) => cost.fits && name !== json.parallelism.recipe).sort((a, b) => a[1].step_seconds - b[1].step_seconds)[0];
    assert.equal(tiles[`speedup over ${rival}`], `${(rivalCost.step_seconds / json.simulated.step_seconds).toFixed(2)}x`);
    assert.equal(await page.locator(".verdict .sentence").textContent(), `${json.summary.slice(`${json.model} on ${json.machine}: `.length)}.`);
    assert.equal(await page.locator(".alarm").count(), 0, "it fits");
    const axes = json.parallelism.axes.filter((axis) => axis.size > 1);
    assert.deepEqual(await page.locator(".mesh .bars th").allTextContents(), axes.map((axis) => `${axis.axis} (${axis.size})`));
    assert.equal(await page.locator(".mesh rect").count(), json.devices);
    assert.equal(simulated.step_seconds, json.simulated.step_seconds);
    for (const name of ["plan", "data"]) {
      const step = name === "plan" ? json.simulated.step_seconds : json.baselines[name].step_seconds;
      const shown = data.steps.find((own) => own.name === name).step_ps / 1e12;
      // A recipe is priced on its best axes; the page has it on the plan's, where reshards may take other steps.
      if (name === "plan") assert.equal(shown, step);
      else assert.ok(Math.abs(shown / step - 1) < 1e-3, `${name}: ${shown} ${step}`);
    }
    assert.equal(tiles["memory per device"], bytes(json.peak_memory_bytes));
    assert.equal(tiles["bytes sent per step"], bytes(json.traffic_bytes));
    assert.ok(!("cost" in tiles), "no price, no cost");
    const baselines = Object.entries(json.baselines).sort((a, b) => a[1].step_seconds - b[1].step_seconds);
    const texts = await page.locator("#summary .bars").first().locator("tr").evaluateAll((rows) => rows.map((row) => [row.cells[0].textContent, row.cells[2].textContent]));
    assert.deepEqual(texts, [["this plan", seconds(json.simulated.step_seconds)], ...baselines.map(([name, cost]) => [described(name, cost), `${seconds(cost.step_seconds)} (${(cost.step_seconds / json.simulated.step_seconds).toFixed(2)}x)`])]);
    const levels = await page.locator("#summary .bars", { hasText: "per level of links" }).locator(".value").allTextContents();
    assert.deepEqual(levels, json.traffic_per_level.map((level) => bytes(level.bytes)));
    assert.equal(await page.locator(".bars").first().locator("tr").count(), 1 + Object.keys(json.baselines).length);

    // Search and sort.
    const spent = json.ops.map((_, op) => data.steps[0].compute_ps[op] + data.steps[0].moves.filter((move) => move.to === op).reduce((sum, move) => sum + move.ps, 0));
    assert.equal(await page.locator("#ops .link").first().textContent(), json.ops[spent.indexOf(Math.max(...spent))].name, "the longest op is first");
    await page.fill("#op-search", "conv5 backward");
    const expected = json.ops.filter((op, at) => op.name.includes("conv5") && data.ops[at].phase === "backward").length;
    assert.equal(await page.locator("#ops .count").textContent(), `${expected} of ${json.ops.length} ops`);
    await page.fill("#op-search", "no such op");
    assert.equal(await page.locator("#ops .link").count(), 0);
    await page.fill("#op-search", "");
    await page.locator("#ops th button", { hasText: "computing" }).click();
    const slowest = data.steps[0].compute_ps.indexOf(Math.max(...data.steps[0].compute_ps));
    assert.equal(await page.locator("#ops .link").first().textContent(), json.ops[slowest].name);
    const cells = await page.locator("#ops tbody tr").first().locator("td").allTextContents();
    const sent = data.steps[0].moves.filter((move) => move.to === slowest);
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    assert.deepEqual(cells.slice(1, 8), [seconds(spent[slowest] / 1e12), seconds(data.steps[0].compute_ps[slowest] / 1e12), seconds(sum(sent.map((move) => move.ps)) / 1e12),
      json.ops[slowest].config, sent.some((move) => move.bytes) ? bytes(sum(sent.map((move) => move.bytes))) : "-", json.ops[slowest].kind, data.ops[slowest].phase]);
    await page.locator("#ops th button", { hasText: "computing" }).click();
    assert.equal(await page.locator("#ops th[aria-sort]").getAttribute("aria-sort"), "ascending");

    // An op in detail, by keyboard.
    await page.fill("#op-search", "fc6");
    await page.locator("#ops .link", { hasText: /^fc6$/ }).focus();
    await page.keyboard.press("Enter");
    assert.equal(await page.locator(".detail h2").textContent(), "fc6");
    assert.ok((await page.locator(".detail").textContent()).includes(json.ops.find((op) => op.name === "fc6").config));
    const fc6 = json.ops.findIndex((op) => op.name === "fc6");
    await explanationIsTold(page, data, fc6);
    const told = JSON.parse(shardwright("explain", join(folder, "vgg16.json"), "fc6", "--most", "6", "--json")).choices[0];
    const shown = data.explanations.find((own) => own.op === fc6);
    assert.equal(told.reoptimised, "exact");
    assert.deepEqual([told.chosen, ...told.alternatives].map((own) => [own.config, own.reoptimised_change_seconds]), shown.options.map((own) => [own.config, own.reoptimised_ps / 1e12]));
    await memoryIsTold(page, data);
    await checkAxe(page);
    await page.keyboard.press("Escape");
    assert.ok(await page.locator(".detail").isHidden());

    // An op's address opens it.
    await page.evaluate(() => (location.hash = "op=fc7"));
    await page.locator(".detail h2", { hasText: /^fc7$/ }).waitFor();
    await page.keyboard.press("Escape");
    assert.equal(await page.evaluate(() => location.hash), "");

    // Every op that computes is in the roofline, and all time and memory in the modules.
    const timed = new Set(json.ops.flatMap((op, at) => (data.ops[at].device_flops && data.ops[at].device_bytes && data.steps[0].compute_ps[at] ? [`${op.name.replace(/(^|[. ])\d+(?=\.)/g, "$1*")} ${op.config} ${data.ops[at].device_flops} ${data.ops[at].device_bytes}`] : [])));
    assert.equal(await page.locator("#roofline circle.op").count(), timed.size);
    assert.ok((await page.locator("#where .tree").first().textContent()).includes(seconds(sum(data.steps[0].compute_ps) / 1e12)));
    assert.ok((await page.locator("#where .treemap rect").count()) > 10);
    const csv = await page.evaluate(() => new Promise((done) => {
      Object.defineProperty(navigator, "clipboard", { value: { writeText: (text) => Promise.resolve(done(text)) } });
      [...document.querySelectorAll("#ops .tools button")].find((own) => own.textContent === "copy CSV").click();
    }));
    assert.ok(csv.startsWith("op,kind,pass,layer,config,") && csv.trim().split("\n").length === 1 + (await page.locator("#ops .count").textContent()).split(" ")[0] * 1);

    // The timeline: hover, zoom, pan, back.
    const canvas = page.locator("#timeline canvas");
    await canvas.scrollIntoViewIfNeeded();
    const box = await canvas.boundingBox();
    await page.mouse.move(box.x + box.width * 0.4, box.y + 74);
    assert.ok((await page.locator(".tip").textContent()).includes("from"));
    const range = page.locator("#timeline .range");
    const whole = await range.textContent();
    await page.getByRole("button", { name: "zoom in" }).click();
    const zoomed = await range.textContent();
    assert.notEqual(zoomed, whole);
    await page.mouse.move(box.x + box.width * 0.6, box.y + 58);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.4, box.y + 58, { steps: 4 });
    await page.mouse.up();
    const panned = await range.textContent();
    assert.notEqual(panned, zoomed);
    await page.keyboard.down("Control");
    await page.mouse.wheel(0, -200);
    await page.keyboard.up("Control");
    assert.notEqual(await range.textContent(), panned);
    await canvas.focus();
    await page.keyboard.press("0");
    assert.equal(await range.textContent(), whole);
    await page.keyboard.press("w");
    await page.keyboard.press("d");
    assert.notEqual(await range.textContent(), whole);
    await page.keyboard.press("0");
    await page.mouse.move(box.x + box.width * 0.4, box.y + 8);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.6, box.y + 8, { steps: 4 });
    await page.mouse.up();
    assert.match(await page.locator("#timeline .tools").textContent(), /measured: .*computing \d/);
    assert.equal(await range.textContent(), whole, "measuring does not pan");
    await page.fill("#timeline-search", "conv1_1");
    const hits = data.steps[0].bars.what.filter((what) => (what >= 0 ? `${json.ops[what].name} ${json.ops[what].kind} ${json.ops[what].config}` : data.steps[0].moves[-1 - what].tensors[0]).includes("conv1_1")).length;
    assert.ok((await page.locator("#timeline .tools").textContent()).includes(`${hits} bar`), `${hits} bars`);
    await page.keyboard.press("Enter");
    assert.notEqual(await range.textContent(), whole, "the view moves to a bar that was searched");
    await page.fill("#timeline-search", "");

    // By keyboard, the timeline is near.
    await page.evaluate(() => document.body.focus());
    await page.locator("nav a").first().focus();
    let tabs = 0;
    while (tabs < 40 && !(await page.evaluate(() => document.activeElement.tagName === "CANVAS"))) {
      await page.keyboard.press("Tab");
      tabs++;
    }
    assert.ok(tabs < 25, `${tabs} tabs to the timeline`);

    // The network: what a layer looks like.
    await page.locator("#network .layer").first().hover();
    assert.ok((await page.locator(".tip svg.tiles rect").count()) >= 1);
    await page.locator("#network .layer").first().click();
    assert.equal(await page.locator(".detail h2").textContent(), json.ops[0].name);
    await page.keyboard.press("Escape");

    // The printed table is complete.
    await page.fill("#op-search", "");
    await page.emulateMedia({ media: "print" });
    await page.evaluate(() => dispatchEvent(new Event("beforeprint")));
    assert.ok((await page.locator("#ops .link").count()) > 40);
    await close();
  });

  test("Inception-v3: dark and wide, written from the plan's file alone", async () => {
    const { page, json, path, close } = await open("inception", ["inception_v3", "--machine", "flat:4", "--batch", "64"], { viewport: { width: 1920, height: 1080 }, colorScheme: "dark" });
    await everyPanelIsThere(page);
    await checkAxe(page);
    await picture(page, "inception-1920-dark");
    shardwright("report", join(folder, "inception.json"), "-o", path);
    await page.reload();
    await page.locator("main:not([aria-busy])").waitFor();
    await everyPanelIsThere(page);
    assert.deepEqual(JSON.parse(await page.locator("#data").textContent()).plan, json);
    assert.ok((await page.locator("#search").textContent()).includes("No search log"));
    await close();
  });

  test("a language model: tokens per second, MFU, memory of the limit and cost, at two widths", async () => {
    const args = ["llama:layers=2,hidden=512,heads=8,kv_heads=2,ffn=1024,vocab=4096", "--seq", "512", "--batch", "32", "--precision", "mixed", "--machine", "8xh100", "--price", "2.5/gpu-hour"];
    const { page, json, close } = await open("llama", args);
    const { throughput } = json;
    for (const width of [1440, 800]) {
      await page.setViewportSize({ width, height: 900 });
      const tiles = await tileTexts(page);
      assert.equal(tiles["throughput per device"], `${rate(throughput.tokens_per_second_per_device)} tokens/s`);
      assert.equal(tiles["MFU"], `${(throughput.mfu * 100).toFixed(1)}%`);
      assert.equal(tiles["cost"], throughput.cost_per_million_tokens.toFixed(4));
      const note = await page.locator("#summary .tile", { hasText: "memory per device" }).locator("span").textContent();
      assert.ok(note.includes(`of the ${bytes(json.memory_limit_bytes)} limit`), note);
      const time = await page.locator("#ops tbody tr").first().locator("td").nth(1).evaluate((cell) => [cell.scrollWidth <= cell.clientWidth, cell.getBoundingClientRect().right <= innerWidth]);
      assert.deepEqual(time, [true, true], `the time of an op is in sight at ${width} pixels`);
      const seen = await page.locator("#summary .tile").evaluateAll((all) => all.every((own) => own.scrollWidth <= own.clientWidth));
      assert.ok(seen, `tiles hold their texts at ${width} pixels`);
      // Charts are drawn for the width at which a page is opened.
      await page.reload();
      await page.locator("main:not([aria-busy])").waitFor();
      for (const id of ["memory", "roofline", "search"]) {
        const height = await page.locator(`#${id} svg.chart text`).first().evaluate((text) => text.getBoundingClientRect().height);
        assert.ok(height > 11, `the text of ${id} is ${height} pixels high at ${width} pixels`);
      }
      await picture(page, `llama-${width}`);
    }
    await close();
  });

  test("a pipeline that does not fit: its passes, its stages' memory, and a warning", async () => {
    const args = ["gpt:layers=2,hidden=128,heads=4,vocab=512,seq=64", "--machine", "flat:4", "--batch", "16", "--pipeline", "2", "--micro-batches", "4", "--solver", "data", "--memory", "none"];
    const { page, json, data, close } = await open("pipeline", args);
    await everyPanelIsThere(page, ["pipeline", ...PANELS]);
    assert.equal(await page.locator("#pipeline .chart rect").count(), json.pipeline.stages.length + data.steps[0].passes.start.length);
    assert.deepEqual(await page.locator("#pipeline .bars .value").allTextContents(), json.pipeline.stages.map((stage) => bytes(stage.peak_memory_bytes)));
    assert.equal(Math.max(...json.pipeline.stages.map((stage) => stage.peak_memory_bytes)), json.peak_memory_bytes, "one peak");
    assert.ok(!(await page.locator("#summary").textContent()).includes("without overlap:"), "stages run at the same time: their sum is no time");
    await checkAxe(page);
    // The same page of a plan that its device could not hold.
    const path = join(folder, "full.html");
    writeFileSync(path, readFileSync(join(folder, "pipeline.html"), "utf8").replace('"fits":true', '"fits":false'));
    await page.goto(pathToFileURL(path).href);
    assert.ok((await page.locator(".alarm").textContent()).startsWith("Does not fit."));
    await page.locator("main:not([aria-busy])").waitFor();
    await checkAxe(page);
    await close();
  });

  // What the pages of different plans look like, at two widths and in both themes.
  const CHAIN = "gpt:layers=8,hidden=256,heads=4,vocab=512,seq=64";
  const looks = {
    "resnet": ["plan", "resnet101", "--machine", "8xa100", "--batch", "64", "--solver", "data"],
    "uniform": ["plan", CHAIN, "--machine", "8xa100", "--batch", "32", "--as", "tp=2,pp=2,vp=2,dp=2,mbs=2"],
    "too-large": ["plan", "gpt:layers=2,hidden=8192,heads=64,vocab=512,seq=64", "--machine", "p100x16:2", "--batch", "4", "--solver", "data", "--memory", "none"],
    "compared": ["compare", CHAIN, "--machine", "flat:4", "--batch", "16", "--solver", "auto,exact,data,fsdp", "--devices", "1,2,4", "--pareto", "2", "--time", "1"],
  };
  for (const [name, args] of Object.entries(looks)) {
    test(`looks of ${name}: nothing cut off, accessible, at two widths and in both themes`, async () => {
      const { page, json, paint, close } = await openPage(`look-${name}`, args);
      console.log(`first paint of ${name} after ${Math.round(paint)} ms`);
      for (const width of [1440, 800]) {
        await page.setViewportSize({ width, height: 900 });
        // Charts are drawn for the width at which a page is opened.
        await page.reload();
        await page.locator("main:not([aria-busy])").waitFor();
        for (const colorScheme of ["light", "dark"]) {
          await page.emulateMedia({ colorScheme });
          await fits(page);
          const cut = await page.locator(".columns .wide, #pipeline .wide").evaluateAll((all) => all.filter((own) => own.scrollWidth > own.clientWidth + 1).map((own) => own.ariaLabel));
          assert.deepEqual(width === 1440 ? cut : [], [], "tables are whole");
          const small = await page.locator("svg.chart:not(.plot) text").evaluateAll((all) => all.filter((own) => own.textContent && own.getBoundingClientRect().height < 11).length);
          assert.equal(small, 0, `small texts at ${width} pixels`);
          await picture(page, `look-${name}-${width}-${colorScheme}`);
          await checkAxe(page);
        }
      }
      if (name === "resnet") assert.match(await page.locator("#timeline .critical").first().textContent(), /23 × layer3\.block\*\.conv2/, "equal blocks are summed");
      if (name === "too-large") {
        assert.ok(!json.fits);
        const usable = json.warnings.map((text) => text.match(/and (\S+ \S+) are usable/)?.[1]).find(Boolean);
        assert.ok((await page.locator(".alarm").textContent()).includes(`would hold ${bytes(json.peak_memory_bytes)} and ${usable} are usable`));
      }
      if (name === "uniform") {
        const groups = [...new Map(json.pipeline.stages.map((stage) => [stage.group, stage.peak_memory_bytes])).values()];
        assert.deepEqual(await page.locator("#pipeline .bars .value").allTextContents(), groups.map(bytes));
        assert.equal(Math.max(...groups), json.peak_memory_bytes, "one peak");
      }
      await close();
    });
  }

  test("ten thousand ops: folded, and only what is in sight is in the page", async () => {
    const { page, json, data, paint, close } = await open("large", ["gpt:layers=160,hidden=768", "--machine", "flat:2", "--solver", "data"]);
    console.log(`first paint of ${json.ops.length} ops after ${Math.round(paint)} ms`);
    assert.ok(json.ops.length >= 10_000, `${json.ops.length} ops`);
    await everyPanelIsThere(page);
    assert.ok((await page.locator("#ops .link").count()) < 100);
    await page.locator("#ops .scroll").evaluate((view) => (view.scrollTop = view.scrollHeight));
    const times = [...data.steps[0].compute_ps];
    data.steps[0].moves.forEach((move) => (times[move.to] += move.ps));
    const least = Math.min(...times);
    await page.waitForFunction((name) => [...document.querySelectorAll("#ops .link")].some((own) => own.textContent === name), json.ops[times.lastIndexOf(least)].name);
    const rails = () => page.locator("#network .rails").evaluate((own) => own.clientHeight);
    const folded = await rails();
    await page.locator("#network .fold").first().click();
    assert.ok((await rails()) > folded, "a fold opens");
    assert.match(await page.locator("#network .fold").first().textContent(), /\d+ × block of \d+ layers/);
    assert.ok((await page.locator("#network .layer").count()) < 100);
    await picture(page, "large-1280-light");
    await close();
  });

  test("GPT-125M from JAX: a step of thousands of ops, proved, with limits of memory", async (own) => {
    const model = join(process.env.SHARDWRIGHT_SHARED ?? "../shared", "models/gpt_125m_adam.mlir");
    if (!existsSync(model)) return own.skip("the file is not here");
    const { page, json, data, paint, close } = await open("gpt125m", [model, "--machine", "flat:4", "--memory", "64GB"]);
    console.log(`first paint of ${json.ops.length} ops of StableHLO after ${Math.round(paint)} ms`);
    await everyPanelIsThere(page);
    assert.deepEqual(data.plan, json);
    assert.equal(data.ops.length, json.ops.length);
    const tiles = await page.locator(".tile strong").allTextContents();
    assert.equal(tiles[0], seconds(json.simulated.step_seconds));
    await memoryIsTold(page, data);

    // Its largest product, found by its time, explained.
    await page.locator("#ops th button", { hasText: "computing" }).click();
    const slowest = data.steps[0].compute_ps.indexOf(Math.max(...data.steps[0].compute_ps));
    await page.locator("#ops .link").first().click();
    assert.equal(await page.locator(".detail h2").textContent(), json.ops[slowest].name);
    await explanationIsTold(page, data, slowest);
    await checkAxe(page);
    await page.keyboard.press("Escape");
    await picture(page, "gpt125m-1280-light");
    await close();
  });

  test("a comparison: strategies, device counts and limits of memory, as --json has them", async () => {
    const args = ["compare", "vgg16", "--machine", "flat:4", "--batch", "64", "--optimizer", "adam", "--solver", "auto,exact,data,owt,model", "--devices", "1,2,4", "--pareto", "3", "--time", "3"];
    const { page, json, data, close } = await openPage("compare", args);
    assert.deepEqual(data, json);
    await fits(page);
    await picture(page, "compare-1280-light");
    const planned = json.rows.filter((row) => row.step_seconds !== null).sort((a, b) => a.step_seconds - b.step_seconds);
    const bars = page.locator("#solvers .bars");
    assert.equal(await bars.count(), 5);
    assert.deepEqual(await bars.first().locator("th").allTextContents(), planned.map((row) => row.solver));
    const values = await bars.first().locator(".value").allTextContents();
    planned.forEach((row, at) => assert.ok(values[at].startsWith(seconds(row.step_seconds)), `${row.solver}: ${values[at]}`));
    assert.deepEqual(await bars.nth(2).locator(".value").allTextContents(), planned.map((row) => bytes(row.peak_memory_bytes)));
    assert.deepEqual(await bars.nth(4).locator(".value").allTextContents(), planned.map((row) => `${row.search_seconds.toFixed(2)} s`));

    // Every strategy at every count is a mark and a cell.
    const points = json.scaling.flatMap((own) => own.rows).filter((row) => row.step_seconds !== null).length;
    assert.equal(await page.locator("#scaling .plot").first().locator(".mark").count(), points);
    const cells = await page.locator("#scaling .figures tbody tr").last().locator("td").allTextContents();
    assert.deepEqual(cells, [json.scaling[2].batch, ...json.scaling[2].rows.map((row) => seconds(row.step_seconds))].map(String));
    await page.locator("#scaling .plot g").last().hover();
    assert.ok((await page.locator(".tip").textContent()).includes("device"));

    const held = await page.locator("#pareto .figures tbody tr td:nth-child(2)").allTextContents();
    assert.deepEqual(held, json.pareto.map((plan) => (plan.peak_memory_bytes === null ? "-" : bytes(plan.peak_memory_bytes))));
    await checkAxe(page);
    await page.emulateMedia({ colorScheme: "dark" });
    await page.setViewportSize({ width: 1920, height: 1080 });
    await fits(page);
    await picture(page, "compare-1920-dark");
    await checkAxe(page);
    await close();
  });

  test("two plans: what changed, with the figures of --json, and both steps on one axis", async () => {
    const plan = (solver) => {
      const path = join(folder, `diff-${solver}.json`);
      shardwright("plan", "vgg16", "--machine", "p100x16", "--batch", "512", "--solver", solver, "-o", path, "-q");
      return path;
    };
    const { page, json, data, close } = await openPage("diff", ["diff", plan("data"), plan("exact")]);
    assert.deepEqual(data.difference, json);
    await everyPanelIsThere(page, ["difference", ...PANELS.filter((id) => id !== "search")]);
    await picture(page, "diff-1280-light");
    const tiles = await page.locator("#difference .tile strong").allTextContents();
    assert.deepEqual(tiles, [seconds(json.step_seconds[1]), seconds(json.objective[1] / 1e12), bytes(json.peak_memory_bytes[1]), bytes(json.traffic_bytes[1])]);
    const signed = (value) => (value === null ? "-" : value === 0 ? "0" : `${value > 0 ? "+" : "−"}${seconds(Math.abs(value))}`);
    const rows = await page.locator(".changes tbody tr").evaluateAll((all) => all.map((row) => [...row.cells].map((cell) => cell.textContent)));
    assert.deepEqual(rows, json.changes.map((own) => [own.op, own.before, own.after, String(own.ops), signed(own.alone_seconds), "", signed(own.undone_seconds)]));
    assert.ok((await page.locator("#timeline").textContent()).includes("First plan"));
    await page.locator(".changes .link").first().click();
    assert.equal(await page.locator(".detail h2").textContent(), json.changes[0].op);
    await page.keyboard.press("Escape");
    await checkAxe(page);
    await page.emulateMedia({ colorScheme: "dark" });
    await page.setViewportSize({ width: 1920, height: 1080 });
    await fits(page);
    await checkAxe(page);
    await picture(page, "diff-1920-dark");
    await close();
  });

  test("names are shown, not run", async () => {
    const model = join(folder, "evil-model.json");
    writeFileSync(model, evilGraph);
    const { page, json, close } = await open("evil", [model, "--machine", "flat:2"]);
    await everyPanelIsThere(page);
    assert.equal(await page.locator("#ops .link").first().textContent(), EVIL);
    assert.ok((await page.title()).startsWith(`${EVIL} on`));
    await page.locator("#ops .link").first().click();
    assert.equal(await page.locator(".detail h2").textContent(), EVIL);
    await page.locator("#network .layer").first().hover({ force: true });
    assert.equal(await page.evaluate(() => window.hacked), undefined);
    assert.equal(await page.locator("img").count(), 0);
    assert.equal(json.ops[0].name, EVIL);
    assert.ok((await page.locator("#memory").textContent()).includes(`w ${EVIL}`));
    await close();

    const plan = (solver) => {
      shardwright("plan", model, "--machine", "flat:2", "--solver", solver, "-o", join(folder, `evil-plan-${solver}.json`), "-q");
      return join(folder, `evil-plan-${solver}.json`);
    };
    for (const args of [["compare", model, "--machine", "flat:2", "--solver", "exact,data", "--devices", "1,2", "--pareto", "1", "--time", "1"], ["diff", plan("data"), plan("model")]]) {
      const other = await openPage(`evil-${args[0]}`, args);
      assert.ok((await other.page.title()).startsWith(`${EVIL} on`));
      assert.ok((await other.page.locator("h1").textContent()).startsWith(EVIL));
      assert.equal(await other.page.evaluate(() => window.hacked), undefined);
      assert.equal(await other.page.locator("img").count(), 0);
      await other.close();
    }
  });
});
