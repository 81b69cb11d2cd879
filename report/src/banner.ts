// The verdict: the plan's answer in one sentence, and a warning where it does not fit.

import { el } from "./dom";
import * as show from "./format";
import { Page } from "./model";

export function banner(report: Page): HTMLElement {
  const { plan } = report;
  const title = `${plan.model} on ${plan.machine}: `;
  const sentence = plan.summary.startsWith(title) ? plan.summary.slice(title.length) : plan.summary;
  const limit = plan.memory_limit_bytes ?? report.usable_memory_bytes ?? report.device_memory_bytes;
  return el("div", { class: "verdict" },
    sentence ? el("p", { class: "sentence" }, sentence, ".") : null,
    plan.fits ? null : el("p", { class: "alarm", role: "alert" },
      el("strong", {}, "Does not fit. "),
      `A device would hold ${show.bytes(plan.peak_memory_bytes)} and ${show.bytes(limit)} are usable. Try --recompute auto, --micro-batches auto, a smaller --batch, or more devices.`));
}
