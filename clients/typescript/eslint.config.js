import eslint from "@eslint/js";
import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["build", "dist", "eslint.config.js"] },
  eslint.configs.recommended,
  tseslint.configs.strictTypeChecked,
  {
    languageOptions: { parserOptions: { project: ["./tsconfig.json", "./tsconfig.build.json"] } },
    rules: {
      // An abort has any reason that its caller gave.
      "@typescript-eslint/only-throw-error": "off",
      "@typescript-eslint/prefer-promise-reject-errors": "off",
      "@typescript-eslint/no-floating-promises": [
        "error",
        { allowForKnownSafeCalls: [{ from: "package", name: "test", package: "node:test" }] },
      ],
      // The caller says what a payload is: `getTask<Page>(id)`.
      "@typescript-eslint/no-unnecessary-type-parameters": "off",
      "@typescript-eslint/explicit-function-return-type": ["error", { allowExpressions: true }],
      "@typescript-eslint/switch-exhaustiveness-check": "error",
    },
  },
);
