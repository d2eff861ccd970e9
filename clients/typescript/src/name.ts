import { createHash } from "node:crypto";
import { createServer, type Server } from "node:net";
import { hostname } from "node:os";
import process from "node:process";

/** The name of a worker without one: that of the variable TASKD_WORKER, or of the host. */
export function defaultName(): string {
  const { TASKD_WORKER: name = "" } = process.env;
  return name === "" ? hostname().slice(0, 80) : name;
}

/**
 * Takes the default name for a worker of these queues, until the returned function is called. It throws when another
 * worker has it: taskd would take both for one. The kernel gives the name back however the process ends. `taskd work`
 * and the packages for Go and Python take names in the same way.
 */
export async function takeName(name: string, queues: readonly string[]): Promise<() => void> {
  if (process.platform !== "linux") {
    throw new TypeError("name: give the worker one; only Linux tells whether another one has the host's");
  }
  const taken: Server[] = [];
  const giveBack = (): void => {
    for (const server of taken) server.close();
  };
  for (const queue of new Set(queues)) {
    const digest = createHash("sha256").update(`${name}\n${queue}`).digest("hex").slice(0, 32);
    const server = createServer((socket) => socket.destroy());
    // It holds up no end of the process.
    server.unref();
    try {
      await new Promise<void>((resolve, reject) => {
        server.once("error", reject);
        // A process of `node:cluster` would share the socket of another one.
        server.listen({ path: `\0taskd-worker/${digest}`, exclusive: true }, resolve);
      });
      taken.push(server);
    } catch (error) {
      giveBack();
      if ((error as NodeJS.ErrnoException).code !== "EADDRINUSE") throw error;
      throw new TypeError(
        `a worker ${name} of queue ${queue} runs on this machine already, and taskd would take both for one: ` +
          `give this one a name of its own, as in name: "${name}-2"`,
        { cause: error },
      );
    }
  }
  return giveBack;
}
