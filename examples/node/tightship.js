// Clients of a pair of tightship services, from the protos alone.

import { fileURLToPath } from "node:url";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

const here = path.dirname(fileURLToPath(import.meta.url));
const protos = path.join(here, "../../protos");

const loaded = protoLoader.loadSync(["tightship/v1/containerizer.proto", "tightship/v1/switchboard.proto"], {
  includeDirs: [protos],
  keepCase: true, // fields by the protos' names
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true, // `event.event` says which one is set
});
const { v1 } = grpc.loadPackageDefinition(loaded).tightship;
const rpc = protobuf.loadSync(path.join(here, "google/rpc/status.proto"));

/** Clients of both services of the run directory. Close them when done: that cancels what is still open. */
export function connect(runDir) {
  const target = (service) => `unix:${path.join(runDir, service)}.sock`;
  const open = (Service, service) => new Service(target(service), grpc.credentials.createInsecure());
  return {
    containerizer: open(v1.ContainerizerService, "containerizer"),
    switchboard: open(v1.SwitchboardService, "switchboard"),
  };
}

/** A unary call as a promise, with a deadline (seconds). */
export function call(client, method, request, seconds = 30) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + seconds * 1000;
    client[method](request, { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
  });
}

/** The messages of a stream, to its end. Raises what the call fails with; a cancel of our own is just the end. */
export async function* messages(stream) {
  try {
    for await (const message of stream) yield message;
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error;
  }
}

/** What a failed call tells beside its code and message: { reason, metadata, retryAfter (seconds) }. */
export function details(error) {
  const told = { reason: "", metadata: {}, retryAfter: undefined };
  const [trailer] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (trailer === undefined) return told;
  for (const { type_url: url, value } of rpc.lookupType("google.rpc.Status").decode(trailer).details) {
    const name = url.slice(url.lastIndexOf("/") + 1);
    if (name === "google.rpc.ErrorInfo") {
      const info = rpc.lookupType(name).decode(value);
      told.reason = info.reason;
      told.metadata = { ...info.metadata };
    } else if (name === "google.rpc.RetryInfo") {
      const { retryDelay } = rpc.lookupType(name).decode(value);
      told.retryAfter = Number(retryDelay.seconds) + retryDelay.nanos / 1e9;
    }
  }
  return told;
}
