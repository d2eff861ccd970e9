// No validator: it would send the document to a server elsewhere.
SwaggerUIBundle({
  url: "../openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  displayRequestDuration: true,
  persistAuthorization: false,
  validatorUrl: null,
});
