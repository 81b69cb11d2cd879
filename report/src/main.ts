// Puts the page together: a plan's, two plans', or a comparison's.

import { comparison } from "./comparison";
import { detail } from "./detail";
import { difference } from "./difference";
import { el } from "./dom";
import { memory } from "./memory";
import { Comparison, opCosts, Report } from "./model";
import { network } from "./network";
import { search } from "./search";
import { summary } from "./summary";
import { table } from "./table";
import { timeline } from "./timeline";
import { mountTip } from "./tip";

interface Content {
  title: string;
  about: string;
  panels: HTMLElement[];
  /** What lies over the panels. */
  drawer?: HTMLElement;
}

function read(): Report | Comparison {
  return JSON.parse(document.getElementById("data")?.textContent ?? "") as Report | Comparison;
}

function planned(report: Report): Content {
  const { plan } = report;
  const costs = opCosts(report);
  const { drawer, select } = detail(report, costs);
  const panels = [summary(report), network(report, costs, select), timeline(report, select), memory(report), table(report, costs, select)];
  const about = `${plan.devices} devices, solver ${plan.solver}, Shardwright ${plan.shardwright_version}`;
  if (report.difference) {
    const title = `${plan.model} on ${plan.machine}: two plans`;
    return { title, about, panels: [difference(report, report.difference, select), ...panels], drawer };
  }
  return { title: `${plan.model} on ${plan.machine}`, about, panels: [...panels, search(report)], drawer };
}

function start(): void {
  const data = read();
  const content: Content = "plan" in data ? planned(data) : comparison(data);
  const { title, about, panels, drawer } = content;
  const menu = el("nav", { "aria-label": "panels" }, ...panels.map((panel) =>
    el("a", { href: `#${panel.id}` }, panel.querySelector("h2")?.textContent ?? panel.id)));
  document.body.append(el("header", {}, el("h1", {}, title), el("p", {}, about), menu), el("main", {}, ...panels));
  if (drawer) document.body.append(drawer);
  mountTip();
}

start();
