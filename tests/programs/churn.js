// What a Node program has of malloc's: buffers outside of its heap, zlib's state, worker threads, the compiler's.
"use strict";
const { Worker, isMainThread, parentPort, workerData } = require("worker_threads");
const crypto = require("crypto");
const zlib = require("zlib");

function garbage(seed) {
    const hash = crypto.createHash("sha256");
    let held = [];
    for (let i = 0; i < 4000; i++) {
        const buffer = Buffer.alloc(1 + ((i * 7919 + seed) % 60000), i & 255);
        held.push({ buffer, text: `${i}-${seed}`.repeat(i % 50), map: new Map([[i, seed]]) });
        if (held.length > 300) {
            const old = held.shift();
            hash.update(old.buffer.subarray(0, 500)).update(old.text);
        }
    }
    return hash.digest("hex");
}

function pack(seed) {
    const hash = crypto.createHash("sha256");
    for (let i = 0; i < 150; i++) {
        const data = Buffer.from(Array.from({ length: 5000 + i * 20 }, (_, at) => (at * (i + seed)) >> 5));
        const packed = i % 2 === 0 ? zlib.deflateSync(data) : zlib.brotliCompressSync(data, {
            params: { [zlib.constants.BROTLI_PARAM_QUALITY]: 4 },
        });
        const back = i % 2 === 0 ? zlib.inflateSync(packed) : zlib.brotliDecompressSync(packed);
        if (!back.equals(data)) {
            throw new Error("what was packed did not come back");
        }
        hash.update(packed);
    }
    return hash.digest("hex");
}

function inWorker(seed) {
    return new Promise((resolve, reject) => {
        const worker = new Worker(__filename, { workerData: { seed } });
        worker.once("message", resolve);
        worker.once("error", reject);
    });
}

async function main() {
    console.log(`garbage ${garbage(1)}`);
    console.log(`pack ${pack(2)}`);
    const results = [];
    for (let round = 0; round < 3; round++) {
        results.push(...(await Promise.all([1, 2, 3, 4].map((seed) => inWorker(seed + round)))));
    }
    console.log(`workers ${crypto.createHash("sha256").update(results.join()).digest("hex")}`);
}

if (isMainThread) {
    main();
} else {
    parentPort.postMessage(garbage(workerData.seed) + pack(workerData.seed));
}
