// Builds the page: of one plan, two plans, or a comparison.
//
// The first panel is painted first; the others are built afterwards.

import { banner } from "./banner";
import { comparison } from "./comparison";
import { detail } from "./detail";
import { difference } from "./difference";
import { el } from "./dom";
import { memory } from "./memory";
import { Comparison, PageContent, opCosts, PanelSpec, Page } from "./model";
import { network } from "./network";
import { pipeline } from "./pipeline";
import { roofline } from "./roofline";
import { search } from "./search";
import { summary } from "./summary";
import { OpTable, table } from "./table";
import { timeline } from "./timeline";
import { mountTip } from "./tip";
import { where } from "./where";

function read(): Page | Comparison {
  return JSON.parse(document.getElementById("data")?.textContent ?? "") as Page | Comparison;
}

function planContent(report: Page): PageContent {
  const { plan } = report;
  const costs = opCosts(report);
  const { drawer, select, fromAddress } = detail(report, costs);
  let made: OpTable | undefined;
  const ops = () => (made ??= table(report, costs, select));
  const two = report.difference;
  const parts: (PanelSpec | null)[] = [
    two ? { id: "difference", title: "Difference", make: () => difference(report, two, select) } : null,
    { id: "summary", title: "Summary", make: () => summary(report) },
    plan.pipeline ? { id: "pipeline", title: "Pipeline", make: () => pipeline(report, plan.pipeline!) } : null,
    { id: "timeline", title: "Timeline", make: () => timeline(report, select) },
    { id: "where", title: "Time and memory by part", make: () => where(report, costs, (text) => ops().find(text)) },
    { id: "network", title: "Network", make: () => network(report, costs, select) },
    { id: "roofline", title: "Roofline", make: () => roofline(report, select) },
    { id: "memory", title: "Memory", make: () => memory(report) },
    { id: "ops", title: "Ops", make: () => ops().panel },
    two ? null : { id: "search", title: "Search", make: () => search(report) },
  ];
  return {
    title: `${plan.model} on ${plan.machine}${two ? ": two plans" : ""}`,
    about: `devices: ${plan.devices}; solver: ${plan.solver}; Shardwright ${plan.shardwright_version}`,
    parts: parts.filter((part) => part !== null),
    verdict: banner(report),
    drawer,
    ready: fromAddress,
  };
}

function start(): void {
  const data = read();
  // What was to be seen while the data were read.
  document.getElementById("first")?.remove();
  const { title, about, parts, verdict, drawer, ready } = "plan" in data ? planContent(data) : comparison(data);
  const menu = el("nav", { "aria-label": "panels" }, ...parts.map((part) => el("a", { href: `#${part.id}` }, part.title)));
  const [first, ...others] = parts;
  const main = el("main", { "aria-busy": "true" }, verdict, first?.make());
  document.body.append(el("header", {}, el("h1", {}, title), el("p", {}, about), menu), main);
  if (drawer) document.body.append(drawer);
  mountTip();
  // Hidden windows get no animation frames, and nothing needs to be painted first.
  const painted = (then: () => void) => (document.hidden ? then() : requestAnimationFrame(() => setTimeout(then)));
  painted(() => {
    main.append(...others.map((part) => part.make()));
    main.removeAttribute("aria-busy");
    if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
    ready?.();
  });
}

start();
