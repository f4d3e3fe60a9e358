// Reads a table of labelled texts for the preview. The server reads the file again and has the last word.

const ENDINGS = { csv: ",", tsv: "\t", jsonl: null };

/** Rows as objects and the names of the columns; throws an Error in plain words. */
export async function readRows(file) {
  const ending = file.name.includes(".") ? file.name.split(".").pop().toLowerCase() : "";
  if (!(ending in ENDINGS)) throw new Error(`${file.name}: only .csv, .tsv and .jsonl files can be read here.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not UTF-8; save it as UTF-8.`);
  }
  const rows = ending === "jsonl" ? jsonLines(file.name, text) : tableRows(file.name, text, ENDINGS[ending]);
  if (!rows.length) throw new Error(`${file.name} has no rows; give at least two per label.`);
  const columns = Object.keys(rows[0]);
  for (const wanted of ["text", "label"]) {
    if (!columns.includes(wanted)) {
      throw new Error(`${file.name} has no column “${wanted}”; its columns are ${columns.map((name) => `“${name}”`).join(", ")}.`);
    }
  }
  const labels = new Map();
  for (const row of rows) labels.set(String(row.label), (labels.get(String(row.label)) ?? 0) + 1);
  if (labels.size < 2) throw new Error(`${file.name} has one label only, “${[...labels.keys()][0]}”; a task needs at least two.`);
  return { rows, labels, pairs: columns.includes("text_b") };
}

function jsonLines(name, text) {
  return text.split("\n").map((line, i) => [line.trim(), i + 1]).filter(([line]) => line).map(([line, number]) => {
    let row;
    try {
      row = JSON.parse(line);
    } catch {
      throw new Error(`${name}, line ${number} is not JSON.`);
    }
    if (row === null || typeof row !== "object" || Array.isArray(row)) throw new Error(`${name}, line ${number} is not a JSON object.`);
    return row;
  });
}

function tableRows(name, text, separator) {
  const [head, ...rest] = records(text, separator);
  if (!head) return [];
  return rest.map((fields, i) => {
    if (fields.length > head.length) throw new Error(`${name}, row ${i + 1}: more fields than columns; quote texts that contain the separator.`);
    return Object.fromEntries(head.map((column, j) => [column, fields[j] ?? ""]));
  });
}

/** The fields of each record: quotes may hold separators and line ends, and a doubled quote is one. */
export function records(text, separator) {
  const found = [];
  let record = [];
  let field = "";
  let inside = false;
  const endField = () => {
    record.push(field);
    field = "";
  };
  const endRecord = () => {
    endField();
    if (record.length > 1 || record[0] !== "") found.push(record);
    record = [];
  };
  for (let i = 0; i < text.length; i += 1) {
    const sign = text[i];
    if (inside) {
      if (sign !== '"') field += sign;
      else if (text[i + 1] === '"') {
        field += sign;
        i += 1;
      } else inside = false;
    } else if (sign === '"' && field === "") inside = true;
    else if (sign === separator) endField();
    else if (sign === "\n" || sign === "\r") {
      if (sign === "\r" && text[i + 1] === "\n") i += 1;
      endRecord();
    } else field += sign;
  }
  if (field !== "" || record.length) endRecord();
  return found;
}
