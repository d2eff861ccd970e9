/** What this package uses of Standard Schema v1, which zod, valibot, arktype and others speak. */
export interface StandardSchema<T = unknown> {
  readonly "~standard": {
    readonly version: 1;
    readonly vendor: string;
    readonly validate: (value: unknown) => StandardResult<T> | Promise<StandardResult<T>>;
    readonly types?: { readonly input: unknown; readonly output: T } | undefined;
  };
}

export type StandardResult<T> =
  { readonly value: T; readonly issues?: undefined } | { readonly issues: readonly StandardIssue[] };

export interface StandardIssue {
  readonly message: string;
  readonly path?: readonly (PropertyKey | { readonly key: PropertyKey })[] | undefined;
}

/** A check of payloads: a Standard Schema, or a function that returns the payload or throws. */
export type Schema<T> = StandardSchema<T> | ((payload: unknown) => T | Promise<T>);

/** The payload is not what the handler's schema wants. Another attempt would not help, so the task is not tried again. */
export class PayloadError extends Error {
  override name = "PayloadError";
}

/** Checks a payload, and returns what the schema makes of it. */
export async function checkPayload<T>(schema: Schema<T>, payload: unknown): Promise<T> {
  // A Standard Schema may be a function, too.
  if (!("~standard" in schema)) {
    try {
      return await schema(payload);
    } catch (error) {
      throw new PayloadError(error instanceof Error ? error.message : String(error), { cause: error });
    }
  }
  const result = await schema["~standard"].validate(payload);
  if (result.issues !== undefined) throw new PayloadError(result.issues.map(issueText).join("; "));
  return result.value;
}

function issueText({ message, path = [] }: StandardIssue): string {
  const place = path.map((part) => String(typeof part === "object" ? part.key : part)).join(".");
  return place === "" ? message : `${place}: ${message}`;
}
