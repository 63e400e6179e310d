#!/bin/sh
# One capsule: the primes among the next `step` numbers. This process begins at a boundary and ends
# at the next one; all that the next process needs lies in $FIEC_STATE_DIR.
set -eu
LC_ALL=C
export LC_ALL

fail() { # for good: trying again would give the same
    echo "$1" >&2
    exit 65
}

# parameter NAME DEFAULT: a number out of the JSON file of parameters
parameter() {
    value=$(sed -n 's/.*"'"$1"'"[[:space:]]*:[[:space:]]*\([0-9][0-9]*\)[[:space:]]*[,}].*/\1/p' \
        "$FIEC_PARAMS")
    echo "${value:-$2}"
}

upto=$(parameter upto 20000)
step=$(parameter step 2000)
[ "$step" -ge 1 ] || fail "params.step must be at least 1, but is $step"
[ "$upto" -le 100000000 ] || fail "params.upto must be at most 100000000, but is $upto"

# σ: the first number that is still to be tried, what was found so far, and a chained checksum.
next=2 count=0 sum=0 chain=0
[ ! -f "$FIEC_STATE_DIR/found" ] || read -r next count sum chain < "$FIEC_STATE_DIR/found"

end=$((next + step))
[ "$end" -le $((upto + 1)) ] || end=$((upto + 1))

# An output becomes visible with the commit of the boundary at which its file lies here.
list=$FIEC_OUTPUTS/primes-$(printf %09d "$next").txt
awk -v from="$next" -v end="$end" 'BEGIN {
    for (n = from; n < end; n++) {
        prime = n >= 2
        for (d = 2; d * d <= n; d++) if (n % d == 0) { prime = 0; break }
        if (prime) print n
    }
}' > "$list"
set -- $(awk '{ sum += $1 } END { printf "%d %.0f", NR, sum }' "$list")
count=$((count + $1)) sum=$((sum + $2))
chain=$( (echo "$chain" && cat "$list") | cksum | cut -d' ' -f1)

if [ "$end" -gt "$upto" ]; then
    printf '{"upto": %s, "primes": %s, "sum": %s, "chain": %s}\n' \
        "$upto" "$count" "$sum" "$chain" > "$FIEC_RESULT"
    exit 0
fi
echo "$end $count $sum $chain" > "$FIEC_STATE_DIR/found"
# For people: capsules done, of how many, and a word.
echo "$((FIEC_BOUNDARY + 1)) $(((upto - 1 + step - 1) / step)) $count primes below $end" \
    > "$FIEC_STATE_DIR/progress"
exit 85
