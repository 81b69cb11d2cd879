// Puts the page together.

import { detail } from "./detail";
import { el } from "./dom";
import { memory } from "./memory";
import { opCosts, Report } from "./model";
import { network } from "./network";
import { search } from "./search";
import { summary } from "./summary";
import { table } from "./table";
import { timeline } from "./timeline";
import { mountTip } from "./tip";

function read(): Report {
  return JSON.parse(document.getElementById("data")?.textContent ?? "") as Report;
}

function start(): void {
  const report = read();
  const { plan } = report;
  const costs = opCosts(report);
  const { drawer, select } = detail(report, costs);
  const panels = [summary(report), network(report, costs, select), timeline(report, select), memory(report), table(report, costs, select), search(report)];
  const menu = el("nav", { "aria-label": "panels" }, ...panels.map((panel) =>
    el("a", { href: `#${panel.id}` }, panel.querySelector("h2")?.textContent ?? panel.id)));
  document.body.append(
    el("header", {}, el("h1", {}, `${plan.model} on ${plan.machine}`),
      el("p", {}, `${plan.devices} devices, solver ${plan.solver}, Shardwright ${plan.shardwright_version}`), menu),
    el("main", {}, ...panels), drawer);
  mountTip();
}

start();
