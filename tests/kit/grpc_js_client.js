// gRPC's client for JavaScript: argv is HOST:PORT, the .proto, "unary" or "stream", and a certificate if there
// is TLS; stdin is a JSON list of requests. It sends all at once, and prints what it got, by id, as JSON.
const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, proto, how, certificate] = process.argv.slice(2);
const definition = loader.loadSync(proto, { keepCase: true, longs: Number });
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const credentials = certificate
  ? grpc.credentials.createSsl(fs.readFileSync(certificate))
  : grpc.credentials.createInsecure();
const client = new GRPCInferenceService(address, credentials);
const requests = JSON.parse(fs.readFileSync(0)).map(({ tensor, timeout_ms, ...rest }) => ({
  timeout_ms,
  message: { ...rest, raw_input_contents: [Buffer.from(tensor, "base64")] },
}));

function describe(answer) {
  return { tensor: answer.raw_output_contents[0].toString("base64") };
}

function ask({ message, timeout_ms }) {
  return new Promise((resolve) => {
    client.ModelInfer(message, { deadline: Date.now() + timeout_ms }, (error, answer) =>
      resolve([message.id, error ? { code: error.code, error: error.details } : describe(answer)]),
    );
  });
}

function converse() {
  return new Promise((resolve) => {
    const answers = [];
    const stream = client.ModelStreamInfer();
    stream.on("data", ({ error_message, infer_response }) => {
      const answer = error_message ? { error: error_message } : describe(infer_response);
      answers.push([infer_response.id, answer]);
      if (answers.length === requests.length) stream.end();
    });
    stream.on("end", () => resolve(answers));
    requests.forEach(({ message }) => stream.write(message));
  });
}

async function main() {
  const answers = how === "stream" ? await converse() : await Promise.all(requests.map(ask));
  console.log(JSON.stringify(Object.fromEntries(answers)));
  client.close();
}

main();
