// How long a comparison of methods takes.

import { roughly } from "./format.js";
import { state } from "./store.js";

const METHODS = 4;
const ROUNDS = 3; // in which the server times them

const promptTokens = ({ report }) => Object.values(report.tokens).reduce((sum, part) => sum + part, 0);

/** Remember how long a comparison took, for each token of its prompt. */
export function notePace(turn) {
  if (turn.report) state.pace = (Date.now() - turn.since) / 1000 / promptTokens(turn);
}

/** What every method takes at least: an answer as long as this one, and a first token in each round. */
const least = (turn) => METHODS * ((turn.seconds ?? 0) + ROUNDS * turn.report.ttft_s);

/** How long a comparison will take, in words. */
export function estimate(turn) {
  if (!turn.report) return "";
  if (state.pace === null) return `Takes at least ${roughly(least(turn))}.`;
  return `Takes about ${roughly(state.pace * promptTokens(turn))}, as the latest one did.`;
}

/** How long it will go on, in words; empty where nothing can be said. */
export function left(turn, rounds) {
  const rows = turn.rows ?? [];
  if (rows.length === METHODS) {
    const round = rows.reduce((sum, row) => sum + row.ttft_s, 0);
    return `about ${roughly((ROUNDS - rounds) * round)} left`;
  }
  if (!turn.report) return "";
  const passed = (Date.now() - turn.since) / 1000;
  const all = state.pace === null ? least(turn) : state.pace * promptTokens(turn);
  if (passed >= all) return "longer than estimated";
  return `${state.pace === null ? "at least" : "about"} ${roughly(all - passed)} left`;
}
