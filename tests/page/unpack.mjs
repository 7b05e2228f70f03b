// Unpacks Chromium, and the libraries that it needs beside those of every system, into the folder named.
import { createReadStream, createWriteStream, mkdirSync, renameSync } from "node:fs";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";
import { extract } from "tar-fs";

const folder = process.argv[2];
const packed = (name) => createReadStream(new URL(`node_modules/@sparticuz/chromium/bin/${name}.br`, import.meta.url));
mkdirSync(folder, { recursive: true });
await pipeline(packed("al2023.tar"), createBrotliDecompress(), extract(folder));
const unfinished = `${folder}/chromium.part`;
await pipeline(packed("chromium"), createBrotliDecompress(), createWriteStream(unfinished, { mode: 0o755 }));
renameSync(unfinished, `${folder}/chromium`);
