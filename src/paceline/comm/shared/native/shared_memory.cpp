// Collectives through shared memory, in rounds of one chunk each: the same protocol, counters and slots as the Python of
// board.py, whose docstring explains it, at the speed of the memory.
//
// An operation is a value that its owner keeps. `advance` does what can be done now, looks for others for a while, and
// says whether it is done, waits, or met a rank that called something else; it never blocks, so its caller can see to
// other operations and to ranks that died. All numbers of an operation are elements, except where a name says bytes.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

enum Counter { ARRIVED = 0, REDUCED = 1, DONE = 2 };
enum Kind { ALL_REDUCE = 1, REDUCE_SCATTER = 2, ALL_GATHER = 3, BROADCAST = 4 };  // as in board.py
enum Op { SUM = 0, AVG = 1, MIN = 2, MAX = 3, PRODUCT = 4 };
enum Type { FLOAT64 = 0, FLOAT32 = 1, FLOAT16 = 2, BFLOAT16 = 3, INT64 = 4, INT32 = 5, BYTES = 8 };
enum Status { FINISHED = 0, WAITING = 1, MISMATCH = 2 };

constexpr int64_t STAMPS = 3;   // after the counters, one word for each slot: what a rank calls there
constexpr int64_t PLACES = 8;   // then one for each slot: where in the common buffers its tensor lies, 0 if nowhere
constexpr int64_t SLOTS = 5;
constexpr int64_t WORDS = 16;   // of a rank, two cache lines
constexpr int64_t ALIGN = 16;   // elements: slices of two ranks share no cache line
constexpr int64_t BLOCK = 2048; // elements that are summed at a time, in the nearest cache

}  // namespace

extern "C" {

struct Group {
    int64_t* words;
    char* slots;
    char** common;  // the areas of the common buffers, each rank's after the other's
    int64_t* common_bytes;  // of one rank, of each of them
    int64_t size, rank, slot_bytes;
};

struct Operation {
    const char* input;
    char* output;
    int64_t kind, type, op, source, is_small;
    int64_t length;  // all_reduce, broadcast: of the tensor; reduce_scatter, all_gather: of a rank's piece
    int64_t meeting, first, rounds;  // its tickets; no meeting if it is 0
    int64_t stamp, place;
    int64_t put, reduced, taken;  // rounds that are through
    int64_t counter, ticket;  // what it waits for
    int64_t culprit, moves;
};

}  // extern "C"

namespace {

// Elements. The narrow ones are summed in float, and rounded once.

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };

template <typename T> struct Wide { using type = T; };
template <> struct Wide<Half> { using type = float; };
template <> struct Wide<Brain> { using type = float; };

template <typename T> inline T widen(T value) { return value; }
template <typename T> inline T narrow(T value, T*) { return value; }

inline float of_bits(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline uint32_t bits_of(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }

inline float widen(Brain value) { return of_bits(uint32_t(value.bits) << 16); }
inline Brain narrow(float value, Brain*) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to the nearest, ties to even
    return Brain{uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

#if defined(__aarch64__)
using Float16 = __fp16;
#define PACELINE_HALF 1
#elif defined(__FLT16_MANT_DIG__) && (defined(__clang__) || __GNUC__ >= 13)
using Float16 = _Float16;
#define PACELINE_HALF 1
#else
using Float16 = float;  // never used: the caller sums halves by itself then
#define PACELINE_HALF 0
#endif

inline float widen(Half value) {
    Float16 half{};
    std::memcpy(&half, &value.bits, 2);
    return float(half);
}
inline Half narrow(float value, Half*) {
    const Float16 half = Float16(value);
    Half result;
    std::memcpy(&result.bits, &half, 2);
    return result;
}

template <typename T> inline bool is_nan(T value) {
    if constexpr (std::is_floating_point_v<T>) return value != value;
    return false;
}

template <int OP, typename T> inline T pair(T one, T other) {
    if constexpr (OP == MIN) return is_nan(one) || (!is_nan(other) && one < other) ? one : other;
    if constexpr (OP == MAX) return is_nan(one) || (!is_nan(other) && one > other) ? one : other;
    if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;
        return T(OP == PRODUCT ? U(one) * U(other) : U(one) + U(other));  // wraps, as tensors do
    } else {
        return OP == PRODUCT ? one * other : one + other;
    }
}

// An output may be one of the pieces, element for element, which does not keep a loop from working on many at once.
#if defined(__clang__)
#define PACELINE_EACH _Pragma("clang loop vectorize(assume_safety)") for
#else
#define PACELINE_EACH _Pragma("GCC ivdep") for
#endif

// Reduces `pieces` in rank order into every one of `outputs`, which may be among them. `factor` is 1, or divides exactly.
template <typename T, int OP>
void combine(const T* const* pieces, int64_t num_pieces, T* const* outputs, int64_t num_outputs, int64_t length,
             typename Wide<T>::type factor, bool divides) {
    using W = typename Wide<T>::type;
    W total[BLOCK];
    for (int64_t low = 0; low < length; low += BLOCK) {
        const int64_t count = std::min(BLOCK, length - low);
        const T* first = pieces[0] + low;
        const T* last = pieces[num_pieces - 1] + low;
        T* result = outputs[0] + low;
        if (num_pieces == 2 && !divides) {
            PACELINE_EACH(int64_t i = 0; i < count; ++i) {
                result[i] = narrow(W(pair<OP>(W(widen(first[i])), W(widen(last[i]))) * factor), static_cast<T*>(nullptr));
            }
        } else {
            for (int64_t i = 0; i < count; ++i) total[i] = widen(first[i]);
            for (int64_t number = 1; number < num_pieces; ++number) {
                const T* piece = pieces[number] + low;
                for (int64_t i = 0; i < count; ++i) total[i] = pair<OP>(total[i], W(widen(piece[i])));
            }
            if (divides) {
                for (int64_t i = 0; i < count; ++i) total[i] /= W(num_pieces);
            }
            for (int64_t i = 0; i < count; ++i) result[i] = narrow(W(total[i] * factor), static_cast<T*>(nullptr));
        }
        for (int64_t number = 1; number < num_outputs; ++number) {
            std::memcpy(outputs[number] + low, result, size_t(count) * sizeof(T));
        }
    }
}

template <typename T>
void reduce(const char* const* pieces, int64_t num_pieces, char* const* outputs, int64_t num_outputs, int64_t length,
            int64_t op) {
    const T* const* from = reinterpret_cast<const T* const*>(pieces);
    T* const* to = reinterpret_cast<T* const*>(outputs);
    using W = typename Wide<T>::type;
    const bool exact = (num_pieces & (num_pieces - 1)) == 0;  // then the reciprocal divides exactly, and much faster
    const W factor = op == AVG && exact ? W(1) / W(num_pieces) : W(1);
    if (op == MIN) combine<T, MIN>(from, num_pieces, to, num_outputs, length, W(1), false);
    else if (op == MAX) combine<T, MAX>(from, num_pieces, to, num_outputs, length, W(1), false);
    else if (op == PRODUCT) combine<T, PRODUCT>(from, num_pieces, to, num_outputs, length, W(1), false);
    else combine<T, SUM>(from, num_pieces, to, num_outputs, length, factor, op == AVG && !exact);
}

int64_t bytes_of(int64_t type) {
    switch (type) {
        case FLOAT64: case INT64: return 8;
        case FLOAT32: case INT32: return 4;
        case FLOAT16: case BFLOAT16: return 2;
        default: return 1;
    }
}

constexpr int64_t MOST_RANKS = 1024;

void reduce_any(int64_t type, const char* const* pieces, int64_t num_pieces, char* const* outputs, int64_t num_outputs,
                int64_t length, int64_t op) {
    switch (type) {
        case FLOAT64: reduce<double>(pieces, num_pieces, outputs, num_outputs, length, op); break;
        case FLOAT32: reduce<float>(pieces, num_pieces, outputs, num_outputs, length, op); break;
        case FLOAT16: reduce<Half>(pieces, num_pieces, outputs, num_outputs, length, op); break;
        case BFLOAT16: reduce<Brain>(pieces, num_pieces, outputs, num_outputs, length, op); break;
        case INT64: reduce<int64_t>(pieces, num_pieces, outputs, num_outputs, length, op); break;
        case INT32: reduce<int32_t>(pieces, num_pieces, outputs, num_outputs, length, op); break;
        default: break;
    }
}

// The counters.

std::atomic<int64_t>& word(const Group& group, int64_t rank, int64_t index) {
    static_assert(sizeof(std::atomic<int64_t>) == 8 && std::atomic<int64_t>::is_always_lock_free);
    return reinterpret_cast<std::atomic<int64_t>&>(group.words[rank * WORDS + index]);
}

bool reached(const Group& group, int64_t counter, int64_t ticket) {
    for (int64_t rank = 0; rank < group.size; ++rank) {
        if (word(group, rank, counter).load(std::memory_order_acquire) < ticket) return false;
    }
    return true;
}

void publish(const Group& group, int64_t counter, int64_t ticket) {
    word(group, group.rank, counter).store(ticket, std::memory_order_release);
}

char* slot(const Group& group, int64_t rank, int64_t ticket) {
    return group.slots + (rank * SLOTS + ticket % SLOTS) * group.slot_bytes;
}

void sign(const Group& group, const Operation& operation, int64_t ticket) {
    word(group, group.rank, STAMPS + ticket % SLOTS).store(operation.stamp, std::memory_order_relaxed);
    word(group, group.rank, PLACES + ticket % SLOTS).store(operation.place, std::memory_order_relaxed);
}

// Says whether a rank called something else in this round.
bool differs(const Group& group, Operation& operation, int64_t rank, int64_t ticket) {
    if (word(group, rank, STAMPS + ticket % SLOTS).load(std::memory_order_relaxed) == operation.stamp) return false;
    operation.culprit = rank;
    operation.ticket = ticket;
    return true;
}

void bounds(int64_t length, int64_t size, int64_t rank, int64_t* low, int64_t* high) {
    int64_t each = (length + size - 1) / size;
    each = (each + ALIGN - 1) / ALIGN * ALIGN;
    *low = std::min(rank * each, length);
    *high = std::min((rank + 1) * each, length);
}

// Where a common buffer that some rank named lies in this process.
char* common_place(const Group& group, int64_t rank, int64_t place) {
    const int64_t number = (place >> 40) - 1, offset = place & ((int64_t(1) << 40) - 1);
    return group.common[number] + rank * group.common_bytes[number] + offset;
}

// One round of an operation is three things, each of which waits for the others: to put data in (until the slot is
// free), to reduce or read what all put in, and to take the results out.

struct Round {
    const Group& group;
    Operation& operation;
    int64_t item = bytes_of(operation.type);

    int64_t chunk() const { return group.slot_bytes / item; }
    int64_t cell() const { return std::max<int64_t>(1, chunk() / group.size / ALIGN * ALIGN); }
    bool is_small() const { return operation.kind == ALL_REDUCE && operation.is_small; }

    int64_t step() const { return operation.kind == REDUCE_SCATTER ? cell() : chunk(); }
    int64_t low(int64_t number) const { return number * step(); }
    int64_t count(int64_t number) const { return std::min(step(), operation.length - low(number)); }

    void put(int64_t number) const {
        const int64_t ticket = operation.first + number;
        char* own = slot(group, group.rank, ticket);
        sign(group, operation, ticket);
        switch (operation.kind) {
            case ALL_REDUCE: put_slices(number, own); break;
            case REDUCE_SCATTER:
                for (int64_t rank = 0; rank < group.size; ++rank) {
                    if (rank == group.rank) continue;
                    std::memcpy(own + rank * cell() * item, operation.input + (rank * operation.length + low(number)) * item,
                                size_t(count(number) * item));
                }
                break;
            case ALL_GATHER: std::memcpy(own, operation.input + low(number), size_t(count(number))); break;
            case BROADCAST: std::memcpy(own, operation.input + low(number), size_t(count(number))); break;
        }
        publish(group, ARRIVED, ticket);
    }

    void put_slices(int64_t number, char* own) const {
        const char* data = operation.input + low(number) * item;
        if (is_small()) {
            std::memcpy(own, data, size_t(count(number) * item));
            return;
        }
        int64_t from, to;
        bounds(count(number), group.size, group.rank, &from, &to);
        std::memcpy(own, data, size_t(from * item));
        std::memcpy(own + to * item, data + to * item, size_t((count(number) - to) * item));
    }

    // False where some rank called something else.
    bool reduce_own(int64_t number) const {
        const int64_t ticket = operation.first + number;
        if (operation.kind == BROADCAST) return !differs(group, operation, operation.source, ticket);
        for (int64_t rank = 0; rank < group.size; ++rank) {
            if (differs(group, operation, rank, ticket)) return false;
        }
        if (operation.kind == ALL_REDUCE) reduce_slice(number, ticket);
        if (operation.kind == REDUCE_SCATTER) reduce_piece(number, ticket);
        return true;
    }

    void reduce_slice(int64_t number, int64_t ticket) const {
        const char* pieces[MOST_RANKS];
        int64_t from = 0, to = count(number);
        if (!is_small()) bounds(count(number), group.size, group.rank, &from, &to);
        for (int64_t rank = 0; rank < group.size; ++rank) pieces[rank] = slot(group, rank, ticket) + from * item;
        char* data = operation.output + (low(number) + from) * item;
        char* outputs[2] = {data, slot(group, group.rank, ticket) + from * item};
        pieces[group.rank] = data;
        if (to > from) reduce_any(operation.type, pieces, group.size, outputs, is_small() ? 1 : 2, to - from, operation.op);
        if (!is_small()) publish(group, REDUCED, ticket);
    }

    void reduce_piece(int64_t number, int64_t ticket) const {
        const char* pieces[MOST_RANKS];
        for (int64_t rank = 0; rank < group.size; ++rank) pieces[rank] = slot(group, rank, ticket) + group.rank * cell() * item;
        pieces[group.rank] = operation.input + (group.rank * operation.length + low(number)) * item;
        char* outputs[1] = {operation.output + low(number) * item};
        reduce_any(operation.type, pieces, group.size, outputs, 1, count(number), operation.op);
    }

    void take(int64_t number) const {
        const int64_t ticket = operation.first + number;
        if (operation.kind == ALL_REDUCE && !is_small()) {
            for (int64_t rank = 0; rank < group.size; ++rank) {
                int64_t from, to;
                bounds(count(number), group.size, rank, &from, &to);
                if (rank == group.rank || to <= from) continue;
                std::memcpy(operation.output + (low(number) + from) * item, slot(group, rank, ticket) + from * item,
                            size_t((to - from) * item));
            }
        } else if (operation.kind == ALL_GATHER) {
            for (int64_t rank = 0; rank < group.size; ++rank) {
                if (rank == group.rank) continue;
                std::memcpy(operation.output + rank * operation.length + low(number), slot(group, rank, ticket),
                            size_t(count(number)));
            }
        } else if (operation.kind == BROADCAST && group.rank != operation.source) {
            std::memcpy(operation.output + low(number), slot(group, operation.source, ticket), size_t(count(number)));
        }
        publish(group, DONE, ticket);
    }
};

// Does one thing of an operation, the most urgent one; WAITING if none can be done, and MISMATCH as it says.
Status move(const Round& round) {
    const Group& group = round.group;
    Operation& operation = round.operation;
    const bool only_reads = operation.kind == BROADCAST && group.rank != operation.source;
    const bool only_writes = operation.kind == BROADCAST && !only_reads;
    auto blocked_by = [&](int64_t counter, int64_t ticket) {
        operation.counter = counter;
        operation.ticket = ticket;
        return WAITING;
    };
    if (operation.taken < operation.reduced) {
        const int64_t ticket = operation.first + operation.taken;
        const bool meets_again = operation.kind == ALL_REDUCE && !round.is_small();
        if (!meets_again || reached(group, REDUCED, ticket)) {
            round.take(operation.taken++);
            return FINISHED;
        }
        blocked_by(REDUCED, ticket);
    }
    if (operation.reduced < operation.put) {
        const int64_t ticket = operation.first + operation.reduced;
        const bool here = only_writes || (only_reads ? word(group, operation.source, ARRIVED).load(std::memory_order_acquire) >= ticket
                                                     : reached(group, ARRIVED, ticket));
        if (here) {
            if (!only_writes && !round.reduce_own(operation.reduced)) return MISMATCH;
            operation.reduced++;
            return FINISHED;
        }
        if (operation.taken == operation.reduced) blocked_by(ARRIVED, ticket);
    }
    if (operation.put < operation.rounds) {
        const int64_t ticket = operation.first + operation.put;
        if (only_reads) {
            operation.put++;
            return FINISHED;
        }
        if (reached(group, DONE, ticket - SLOTS)) {
            round.put(operation.put++);
            return FINISHED;
        }
        if (operation.taken == operation.put) blocked_by(DONE, ticket - SLOTS);
    }
    return WAITING;
}

// A round before an all-reduce of tensors that lie in a common buffer, in which the ranks learn whether all do. Then every
// rank reduces its slice of all, in place and for all, and is done; else the rounds follow.
Status move_in_place(const Round& round) {
    const Group& group = round.group;
    Operation& operation = round.operation;
    const int64_t ticket = operation.meeting, last = operation.first + operation.rounds - 1;
    auto wait_for = [&](int64_t counter, int64_t number) {
        operation.counter = counter;
        operation.ticket = number;
        return reached(group, counter, number);
    };
    if (operation.put == 0) {
        if (!wait_for(DONE, ticket - SLOTS)) return WAITING;
        sign(group, operation, ticket);
        publish(group, ARRIVED, ticket);
        operation.put = 1;
    } else if (operation.reduced == 0) {
        if (!wait_for(ARRIVED, ticket)) return WAITING;
        char* pieces[MOST_RANKS];
        bool all_in_place = true;
        int64_t from, to;
        bounds(operation.length, group.size, group.rank, &from, &to);
        for (int64_t rank = 0; rank < group.size; ++rank) {
            if (differs(group, operation, rank, ticket)) return MISMATCH;
            const int64_t place = word(group, rank, PLACES + ticket % SLOTS).load(std::memory_order_relaxed);
            all_in_place = all_in_place && place && place >> 40 == operation.place >> 40;
            if (all_in_place) pieces[rank] = common_place(group, rank, place) + from * round.item;
        }
        if (!all_in_place) {
            publish(group, DONE, ticket);
            operation.meeting = operation.put = 0;
            return FINISHED;
        }
        if (to > from) reduce_any(operation.type, pieces, group.size, pieces, group.size, to - from, operation.op);
        publish(group, REDUCED, ticket);
        operation.reduced = 1;
    } else {
        if (!wait_for(REDUCED, ticket)) return WAITING;
        publish(group, DONE, last);  // of the rounds that are not needed, too
        operation.taken = operation.rounds;
    }
    return FINISHED;
}

inline void pause() {
#if defined(__aarch64__)
    asm volatile("yield");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

extern "C" {

int64_t paceline_has_half() { return PACELINE_HALF; }

// Moves an operation on, and looks for others for at most `patience_ns` without progress.
int64_t paceline_advance(const Group* group, Operation* operation, int64_t patience_ns) {
    using Clock = std::chrono::steady_clock;
    const Round round{*group, *operation};
    Clock::time_point start{};
    while (operation->taken < operation->rounds) {
        const Status status = operation->meeting ? move_in_place(round) : move(round);
        if (status == MISMATCH) return MISMATCH;
        if (status == FINISHED) {
            operation->moves++;
            start = {};
            continue;
        }
        if (patience_ns == 0) return WAITING;
        const auto now = Clock::now();
        if (start == Clock::time_point{}) start = now;
        if (std::chrono::nanoseconds(now - start).count() > patience_ns) return WAITING;
        for (int look = 0; look < 16; ++look) pause();
    }
    return FINISHED;
}

}  // extern "C"
