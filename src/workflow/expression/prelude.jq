# What expressions may call besides the functions in natives.rs and those of jaq-core's first list.
# A definition uses only what stands above it.

def empty: {}[] as $x | .;
def error: error_empty as $x | .;
def error(message): (message | error_empty) as $x | .;
def not: if . then false else true end;
def select(f): if f then . else empty end;

def tostring: "\(.)";
def tojson: to_json_text;
def values: select(. != null);
def nulls: select(. == null);
def booleans: select(type == "boolean");
def numbers: select(type == "number");
def strings: select(type == "string");
def arrays: select(type == "array");
def objects: select(type == "object");
def iterables: select(type | . == "array" or . == "object");
def scalars: select(type | . != "array" and . != "object");
def isinfinite: . == infinite or . == -infinite;
def isnormal: (. == 0 or isnan or isinfinite) | not;
def isvalid(f): try (f | true) catch false;
def finites: select(isinfinite or isnan | not);
def normals: select(isnormal);
def toarray: if type == "array" then . else [.] end;

def range($from; $to): range($from; $to; 1);
def range($to): range(0; $to; 1);
def repeat(f): def rec: ., (f | rec); rec;
def recurse(f): def rec: ., (f | rec); rec;
def recurse: recurse(.[]?);
def recurse(f; condition): def rec: ., (f | select(condition) | rec); rec;
def while(condition; update): def rec: if condition then ., (update | rec) else empty end; rec;
def until(condition; update): def rec: if condition then . else update | rec end; rec;

def map(f): [.[] | f];
def map_values(f): .[] |= f;
def first: .[0];
def last: .[-1];
def nth($n): .[$n];
def nth($n; f): if $n < 0 then error("nth does not take negative indices") else first(skip($n; f)) end;
def isempty(f): first((f | false), true);
def all(f; condition): isempty(first(f | condition and empty));
def any(f; condition): isempty(first(f | condition or empty)) | not;
def all(condition): all(.[]; condition);
def any(condition): any(.[]; condition);
def all: all(.[]; .);
def any: any(.[]; .);
def in(xs): . as $x | xs | has($x);
def inside(xs): . as $x | xs | contains($x);
def IN(f): any(f == .; .);
def IN(source; f): any(source == f; .);
def INDEX(stream; f): reduce stream as $row ({}; .[$row | f | tostring] |= $row);
def INDEX(f): INDEX(.[]; f);
def add(f): reduce f as $x (null; . + $x);
def index($i): indices($i) | .[0];
def rindex($i): indices($i) | .[-1:][0];
def combinations: if length == 0 then [] else .[0][] as $x | (.[1:] | combinations) as $rest | [$x] + $rest end;
def combinations($n): . as $dot | [range($n)] | map($dot) | combinations;
def flatten: flatten(1e9);
def transpose: [range([.[] | length] | max // 0) as $i | [.[][$i]]];
def unique_by(f): [group_by(f)[] | .[0]];
def walk(f): def rec: if type == "object" then map_values(rec) elif type == "array" then map(rec) else . end | f; rec;

def to_entries: [key_values[] | {key: .[0], value: .[1]}];
def from_entries: reduce .[] as $entry ({}; . + {
    ($entry | (if has("key") then .key elif has("k") then .k elif has("name") then .name
        elif has("Name") then .Name elif has("Key") then .Key elif has("K") then .K else null end)
        | if type == "string" then . else tojson end):
    ($entry | if has("value") then .value elif has("v") then .v else .Value end)});
def with_entries(f): to_entries | map(f) | from_entries;

def paths: path(..) | select(length > 0);
def paths(f): path(.. | select(f)) | select(length > 0);
def leaf_paths: paths(scalars);
def getpath($path): reduce $path[] as $p (.; .[$p]);
def setpath($path; $value): getpath($path) |= $value;
def del(f): delpaths([path(f)]);
def pick(f): . as $top | reduce path(f) as $path (null; setpath($path; $top | getpath($path)));
def tostream: path(def rec: (.[]? | rec), .; rec) as $path | getpath($path)
    | reduce path(.[]?) as $inner ([$path, .]; [$path + $inner]);
def fromstream(f): {x: null, e: false} as $start
    | foreach f as $event ($start;
        if .e then $start else . end
        | if $event | length == 2
          then setpath(["e"]; $event[0] | length == 0) | setpath(["x"] + $event[0]; $event[1])
          else setpath(["e"]; $event[0] | length == 1) end;
        if .e then .x else empty end);
def truncate_stream(stream): . as $depth | stream | select(.[0] | length > $depth) | .[0] |= .[$depth:];

def ascii: [.] | implode;
def todate: todateiso8601;
def fromdate: fromdateiso8601;
def date: todateiso8601;

def capture_names: map(select(.name != null) | {key: .name, value: .string}) | from_entries;
def match($re; $flags): matches($re; $flags; false)[];
def match($re): if $re | type == "array" then match($re[0]; $re[1]) else match($re; null) end;
def test($re; $flags): matches($re; $flags; true);
def test($re): if $re | type == "array" then test($re[0]; $re[1]) else test($re; null) end;
def capture($re; $flags): match($re; $flags) | .captures | capture_names;
def capture($re): if $re | type == "array" then capture($re[0]; $re[1]) else capture($re; null) end;
def scan($re; $flags): match($re; "g" + $flags)
    | if (.captures | length) == 0 then .string else [.captures[].string] end;
def scan($re): scan($re; null);
def split($separator): split_text($separator);
def split($re; $flags): . as $text
    | [foreach (match($re; $flags + "g"), null) as $match ({from: 0};
        if $match == null then {part: $text[.from:]}
        else {part: $text[.from:$match.offset], from: ($match.offset + $match.length)} end; .part)];
def splits($re; $flags): split($re; $flags)[];
def splits($re): splits($re; null);
def sub($re; f; $flags): . as $text
    | [match($re; $flags)] as $matches
    | def rec($i; $from):
        if $i == ($matches | length) then $text[$from:]
        else $matches[$i] as $match
          | ($match.captures | capture_names | f) as $new
          | $text[$from:$match.offset] + $new + rec($i + 1; $match.offset + $match.length) end;
      rec(0; 0);
def sub($re; f): sub($re; f; "");
def gsub($re; f; $flags): sub($re; f; $flags + "g");
def gsub($re; f): sub($re; f; "g");

def @text: tostring;
def @json: tojson;
def @csv: to_csv;
def @tsv: to_tsv;
def @html: tostring | escape_html;
def @uri: tostring | escape_uri;
def @sh: to_sh;
def @base64: tostring | encode_base64;
def @base64d: tostring | decode_base64;
