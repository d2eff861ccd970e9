/** Ends when taskd has ended more sessions of silent workers than it had. */

import process from "node:process";

import { silentEnds, until } from "./support.js";

const [, , url = "", ends = ""] = process.argv;
await until("taskd has ended another session", async () => (await silentEnds(url)) > Number(ends));
