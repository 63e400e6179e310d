#!/bin/sh
# One capsule: the longest Collatz chain that begins with one of the next `step` numbers. Nothing
# but the shell itself is used, so that an image with a shell in it suffices.
set -eu

fail() { # for good: trying again would give the same
    echo "$1" >&2
    exit 65
}

# parameter NAME DEFAULT: a number out of the JSON of parameters, which has no nested objects
text=
while read -r line || [ -n "$line" ]; do text="$text$line"; done < "$FIEC_PARAMS"
parameter() {
    case $text in
        *"\"$1\""*) ;;
        *) value=$2; return ;;
    esac
    value=${text#*"\"$1\""}
    value=${value#*:}
    value=${value%%[,\}]*}
    value=${value# }
    case $value in
        '' | *[!0-9]*) fail "params.$1 must be a number, but is $value" ;;
    esac
}
parameter upto 3000; upto=$value
parameter step 500; step=$value
[ "$step" -ge 1 ] || fail "params.step must be at least 1, but is $step"

# σ: the next number to try, the best so far, and how long its chain is.
next=1 best=1 length=1
[ ! -f "$FIEC_STATE_DIR/at" ] || read -r next best length < "$FIEC_STATE_DIR/at"
before=$best
end=$((next + step))
[ "$end" -le $((upto + 1)) ] || end=$((upto + 1))
while [ "$next" -lt "$end" ]; do
    n=$next steps=1
    while [ "$n" -ne 1 ]; do
        if [ $((n % 2)) = 0 ]; then n=$((n / 2)); else n=$((3 * n + 1)); fi
        steps=$((steps + 1))
    done
    if [ "$steps" -gt "$length" ]; then best=$next length=$steps; fi
    next=$((next + 1))
done

# A message to the outside for each new record, published with the commit of this boundary.
[ "$best" = "$before" ] || echo "{\"start\": $best, \"length\": $length}" > "$FIEC_OUTBOX/record"
if [ "$next" -gt "$upto" ]; then
    echo "$best $length" > "$FIEC_OUTPUTS/longest-$upto.txt"
    echo "{\"upto\": $upto, \"start\": $best, \"length\": $length}" > "$FIEC_RESULT"
    exit 0
fi
echo "$next $best $length" > "$FIEC_STATE_DIR/at"
echo "$((FIEC_BOUNDARY + 1)) $(((upto + step - 1) / step)) longest begins with $best" \
    > "$FIEC_STATE_DIR/progress"
exit 85
