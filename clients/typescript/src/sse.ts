import { InvalidAnswerError } from "./errors.js";

/** An event of a stream of Server-Sent Events. A comment has neither name nor data. */
export interface ServerEvent {
  name: string;
  data: string;
  /** The id of the last event that had one. */
  id: string | undefined;
  isComment: boolean;
  /** How long taskd asks to wait before a new connection, in milliseconds. */
  retry?: number;
}

/** The longest event, in characters. Those of taskd have some hundred. */
const LONGEST = 1 << 20;

/** Reads Server-Sent Events, as the HTML standard describes them, out of text that comes in parts. */
export class EventReader {
  #rest = "";
  #name = "";
  #data: string[] = [];
  #size = 0;
  #id: string | undefined;

  /** The events that end within this part. */
  read(text: string): ServerEvent[] {
    this.#rest += text;
    const events: ServerEvent[] = [];
    let begin = 0;
    for (;;) {
      const end = this.#endOfLine(begin);
      if (end === undefined) break;
      const event = this.#line(this.#rest.slice(begin, end.at));
      if (event !== undefined) events.push(event);
      begin = end.next;
    }
    this.#rest = this.#rest.slice(begin);
    if (this.#rest.length + this.#size > LONGEST) throw new InvalidAnswerError("an event is too large");
    return events;
  }

  /** The end of a line is LF, CR, or both. A CR at the very end may have its LF in the next part. */
  #endOfLine(begin: number): { at: number; next: number } | undefined {
    const text = this.#rest;
    for (let at = begin; at < text.length; at += 1) {
      if (text[at] === "\n") return { at, next: at + 1 };
      if (text[at] !== "\r") continue;
      if (at + 1 === text.length) return undefined;
      return { at, next: text[at + 1] === "\n" ? at + 2 : at + 1 };
    }
    return undefined;
  }

  #line(line: string): ServerEvent | undefined {
    if (line === "") return this.#end();
    const colon = line.indexOf(":");
    if (colon === 0) return { name: "", data: "", id: this.#id, isComment: true };
    const [field, rest] = colon === -1 ? [line, ""] : [line.slice(0, colon), line.slice(colon + 1)];
    const value = rest.startsWith(" ") ? rest.slice(1) : rest;
    if (field === "event") this.#name = value;
    else if (field === "data") {
      this.#data.push(value);
      this.#size += value.length + 1;
    } else if (field === "id" && !value.includes("\0")) this.#id = value;
    else if (field === "retry" && /^\d{1,9}$/.test(value)) {
      return { name: "", data: "", id: this.#id, isComment: true, retry: Number(value) };
    }
    return undefined;
  }

  #end(): ServerEvent | undefined {
    const [name, data] = [this.#name, this.#data];
    [this.#name, this.#data, this.#size] = ["", [], 0];
    return data.length === 0 ? undefined : { name, data: data.join("\n"), id: this.#id, isComment: false };
  }
}
