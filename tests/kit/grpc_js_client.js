// gRPC's client for JavaScript: argv is HOST:PORT and the .proto; prints what it got as one line of JSON.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, proto] = process.argv.slice(2);
const definition = loader.loadSync(proto, { keepCase: true, longs: Number });
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(address, grpc.credentials.createInsecure());
const tensor = Buffer.from(new Float32Array([1, 2, 3]).buffer);

function question(id) {
  return {
    model_name: "double",
    id,
    parameters: { slo_ms: { int64_param: 600000 } },
    inputs: [{ name: "x", datatype: "FP32", shape: [1, 3] }],
    raw_input_contents: [tensor],
  };
}

function infer(request) {
  return new Promise((resolve) => {
    const options = { deadline: Date.now() + 60000 };
    client.ModelInfer(request, options, (error, answer) =>
      resolve(error ? { code: error.code, text: error.details } : describe(answer)),
    );
  });
}

function describe(answer) {
  const output = answer.raw_output_contents[0];
  return { id: answer.id, floats: [0, 4, 8].map((offset) => output.readFloatLE(offset)) };
}

function converse(ids) {
  return new Promise((resolve) => {
    const answers = [];
    const stream = client.ModelStreamInfer();
    stream.on("data", (message) => {
      answers.push(describe(message.infer_response));
      if (answers.length === ids.length) stream.end();
    });
    stream.on("end", () => resolve(answers));
    ids.forEach((id) => stream.write(question(id)));
  });
}

async function main() {
  const ids = Array.from({ length: 50 }, (_, index) => `r${index}`);
  const unary = await Promise.all(ids.map((id) => infer(question(id))));
  const streamed = await converse(ids);
  const unknown = await infer({ ...question("u"), model_name: "nobody" });
  console.log(JSON.stringify({ unary, streamed, unknown }));
  client.close();
}

main();
