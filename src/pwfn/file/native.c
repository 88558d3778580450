/* The entropy decoders and the context coder, compiled. coder.py and context_reference.py compute the same in
 * Python, and docs/format.md specifies it. Integers only: every machine computes the same. No function allocates
 * memory, calls Python, or reads or writes beyond the lengths it is given. */
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define PUBLIC __declspec(dllexport)
#else
#define PUBLIC __attribute__((visibility("default")))
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define OPAQUE(value) __asm__("" : "+r"(value)) /* keeps the compiler from turning arithmetic into a branch */
#else
#define INLINE static inline
#define OPAQUE(value) (void)(value)
#endif

enum { INPUTS = 3, LIMIT = 255, POSITIONS = 16, SCALES = 64 };
enum { FINE = 25 * POSITIONS, COLUMN = FINE + 4 * SCALES, CONTEXTS = COLUMN + 63 * SCALES };

typedef struct {
    int64_t rows, channels, kernel, width;
} Shape;

typedef struct {
    int32_t mean, count;
} Mean;

typedef struct {
    const int32_t *children; /* two per node: the next node, or ~symbol */
    const uint16_t *squash;
    const int16_t *stretch;
    const int32_t *share;
    const int32_t *levels;   /* of each symbol */
    const uint64_t *paths;   /* of each symbol, the decisions that lead to it, the first in the lowest bit */
    uint32_t *states;        /* per context and node: probability in the upper 22 bits, count in the lower 10 */
    int64_t *weights;        /* INPUTS per node */
    Mean *channel, *tilt;    /* one per channel of the widest tensor */
    int8_t *empty;           /* likewise */
    int8_t *row;             /* levels of one row of the widest tensor */
    int32_t nodes;           /* the last one decides whether a kernel is empty */
    int32_t zero;            /* the symbol of level 0 */
} Model;

typedef struct {
    uint64_t low, range, code;
    uint8_t *bytes;
    int64_t at, size;
} Range;

PUBLIC int32_t pwfn_contexts(void) { return CONTEXTS; }

INLINE int32_t clip(int32_t value, int32_t most) { return value > most ? most : value < -most ? -most : value; }

INLINE void add(Mean *mean, int32_t value, const int32_t *share) {
    mean->mean += (int32_t)(((int64_t)(value - mean->mean) * share[mean->count]) >> 16);
    mean->count += mean->count < LIMIT;
}

/* Four steps per octave. */
INLINE int32_t scale_of(int32_t mean) {
    uint32_t x = (uint32_t)mean >> 8, e = 2;
    if (x < 4) return (int32_t)x;
#if defined(__GNUC__)
    e = 31u - (uint32_t)__builtin_clz(x);
#else
    while (x >> (e + 1)) e++;
#endif
    return (int32_t)(4 * e + ((x >> (e - 2)) & 3)) - 4;
}

INLINE uint64_t word_at(const Range *r, int64_t at) {
    return at + 2 <= r->size ? (uint64_t)(r->bytes[at] | r->bytes[at + 1] << 8) : 0;
}

/* Writes the upper word of `low`, after the carry into those already written. What does not fit is only counted. */
static void put(Range *r) {
    if (r->low >> 48)
        for (int64_t at = r->at - 2; at >= 0; at -= 2) {
            if (at + 2 > r->size) continue;
            uint32_t word = (uint32_t)(r->bytes[at] | r->bytes[at + 1] << 8) + 1;
            r->bytes[at] = (uint8_t)word;
            r->bytes[at + 1] = (uint8_t)(word >> 8);
            if (word < 65536) break;
        }
    if (r->at + 2 <= r->size) {
        r->bytes[r->at] = (uint8_t)(r->low >> 32);
        r->bytes[r->at + 1] = (uint8_t)(r->low >> 40);
    }
    r->at += 2;
}

/* One decision in the range coder: the lower part of the range is 1. */
INLINE int decide(Range *r, uint32_t probability, int bit, int decoding) {
    uint64_t bound = (r->range >> 16) * probability;
    if (decoding) {
        bit = (int)((r->code - bound) >> 63);
        OPAQUE(bit);
    }
    uint64_t if_0 = (uint64_t)(int64_t)(bit - 1); /* all bits, or none */
    r->range = (bound & ~if_0) | ((r->range - bound) & if_0);
    r->code -= bound & if_0;
    r->low += bound & if_0;
    if (r->range < (uint64_t)1 << 32) {
        r->range <<= 16;
        if (decoding) {
            r->code = r->code << 16 | word_at(r, r->at);
            r->at += 2;
        } else {
            put(r);
            r->low = (r->low << 16) & (((uint64_t)1 << 48) - 1);
        }
    }
    return bit;
}

/* One decision of the model: predict, code, learn. */
INLINE int learn(const Model *m, Range *r, uint32_t *const *states, int32_t node, int bit, int decoding) {
    int64_t *weights = m->weights + (ptrdiff_t)INPUTS * node;
    int32_t inputs[INPUTS];
    int64_t sum = 0;
    for (int i = 0; i < INPUTS; i++) {
        inputs[i] = m->stretch[states[i][node] >> 20];
        sum += weights[i] * inputs[i];
    }
    sum >>= 16;
    int32_t probability = m->squash[(sum > 2047 ? 2047 : sum < -2047 ? -2047 : (int32_t)sum) + 2047];
    bit = decide(r, (uint32_t)probability, bit, decoding);
    int32_t error = (bit << 16) - probability;
    for (int i = 0; i < INPUTS; i++) {
        weights[i] += (inputs[i] * error) >> 15;
        uint32_t state = states[i][node], count = state & 1023;
        int32_t p = (int32_t)(state >> 10);
        p += (int32_t)(((int64_t)((bit << 22) - bit - p) * m->share[count]) >> 16);
        states[i][node] = (uint32_t)p << 10 | (count + (count < LIMIT));
    }
    return bit;
}

INLINE void code(const Model *given, Range *r, const Shape *shapes, int64_t tensors, uint8_t *symbols, int64_t *ends,
                 int decoding) {
    const Model model = *given, *m = &model; /* a copy: writes through pointers to bytes cannot change it */
    for (int64_t t = 0; t < tensors; t++) {
        const Shape s = shapes[t];
        Mean tensor = {1 << 16, 0};
        for (int64_t o = 0; o < s.rows; o++) {
            Mean filter = {tensor.mean, 8};
            int32_t usual = scale_of(tensor.mean);
            for (int64_t i = 0; i < s.channels; i++) {
                if (o == 0) {
                    m->channel[i] = (Mean){filter.mean, 2};
                    m->tilt[i] = (Mean){0, 2};
                    m->empty[i] = 0;
                }
                int32_t scale = 5 * scale_of(filter.mean) + 5 * scale_of(m->channel[i].mean) - 2 * usual;
                scale = scale < 0 ? 0 : scale > 8 * SCALES - 1 ? 8 * SCALES - 1 : scale;
                int32_t tilt = clip(m->tilt[i].mean >> 12, 31) + 31;
                uint32_t *states[INPUTS] = {
                    m->states,
                    m->states + (ptrdiff_t)(FINE + scale / 2) * m->nodes,
                    m->states + (ptrdiff_t)(COLUMN + tilt * SCALES + scale / 8) * m->nodes,
                };
                int8_t *row = m->row + i * s.kernel;
                int64_t size = 0, sum = 0;
                int skip = 0;
                if (s.kernel > 1) {
                    states[0] = m->states + (ptrdiff_t)((i ? m->empty[i - 1] : 0) * 3 + m->empty[i]) * m->nodes;
                    if (!decoding) {
                        skip = 1;
                        for (int64_t k = 0; k < s.kernel; k++) skip &= symbols[k] == m->zero;
                    }
                    skip = learn(m, r, states, m->nodes - 1, skip, decoding);
                    m->empty[i] = (int8_t)(1 + skip);
                }
                for (int64_t k = 0; k < s.kernel; k++) {
                    if (skip) {
                        row[k] = 0;
                        symbols[k] = (uint8_t)m->zero;
                        continue;
                    }
                    int32_t before = k ? row[k - 1] : i ? row[k - s.kernel] : 0;
                    int32_t above = s.kernel == 1 ? 0 : k >= s.width ? row[k - s.width] : i ? row[k - s.kernel] : 0;
                    int32_t near = (clip(before, 2) + 2) * 5 + clip(above, 2) + 2;
                    int32_t position = k < POSITIONS ? (int32_t)k : POSITIONS - 1;
                    states[0] = m->states + (ptrdiff_t)(near * POSITIONS + position) * m->nodes;
                    uint64_t path = decoding ? 0 : m->paths[symbols[k]];
                    int32_t node = 0;
                    do {
                        int bit = learn(m, r, states, node, (int)(path & 1), decoding);
                        path >>= 1;
                        node = m->children[2 * node + bit];
                    } while (node >= 0);
                    symbols[k] = (uint8_t)~node;
                    int32_t level = m->levels[~node];
                    row[k] = (int8_t)level;
                    size += level < 0 ? -level : level;
                    sum += level;
                }
                symbols += s.kernel;
                size = size * 65536 / s.kernel; /* both rounded towards zero */
                sum = sum * 65536 / s.kernel;
                add(&filter, (int32_t)size, m->share);
                add(&m->channel[i], (int32_t)size, m->share);
                add(&m->tilt[i], (int32_t)sum, m->share);
            }
            add(&tensor, filter.mean, m->share);
        }
        if (decoding) ends[t] = r->at - 4;
    }
}

/* Returns the bytes of the stream, of which the first `size` are written. */
PUBLIC int64_t pwfn_context_encode(const Model *m, const Shape *shapes, int64_t tensors, uint8_t *symbols,
                                   uint8_t *bytes, int64_t size) {
    Range r = {0, ((uint64_t)1 << 48) - 1, 0, bytes, 0, size};
    code(m, &r, shapes, tensors, symbols, 0, 0);
    r.low += ((uint64_t)1 << 32) - 1; /* its upper word alone is within the range */
    put(&r);
    return r.at;
}

/* `ends` gets the bytes that the tensors up to each one take: the last is `size`, if the stream is theirs. */
PUBLIC void pwfn_context_decode(const Model *m, const Shape *shapes, int64_t tensors, uint8_t *symbols, uint8_t *bytes,
                                int64_t size, int64_t *ends) {
    Range r = {0, ((uint64_t)1 << 48) - 1, 0, bytes, 0, size};
    for (; r.at < 6; r.at += 2) r.code = r.code << 16 | word_at(&r, r.at);
    code(m, &r, shapes, tensors, symbols, ends, 1);
}

/* ANS with 32-bit words and 24 bits of precision. `left` has where the interval of each rank starts, and 2^24;
 * `first` the rank at each multiple of 2^12. Returns whether the stream ends after the last symbol. */
PUBLIC int32_t pwfn_ans_decode(const uint8_t *bytes, int64_t words, const uint32_t *left, const int32_t *first,
                               const int32_t *symbols, int64_t count, void *out, int32_t width) {
    uint64_t state = 0;
#define POP() (words--, (uint64_t)bytes[4 * words] | (uint64_t)bytes[4 * words + 1] << 8 | \
                            (uint64_t)bytes[4 * words + 2] << 16 | (uint64_t)bytes[4 * words + 3] << 24)
    while (words && !(state >> 32)) state = state << 32 | POP();
    for (int64_t i = 0; i < count; i++) {
        uint32_t slot = (uint32_t)state & 0xFFFFFF;
        int32_t rank = first[slot >> 12];
        while (left[rank + 1] <= slot) rank++;
        state = (state >> 24) * (left[rank + 1] - left[rank]) + (slot - left[rank]);
        if (words && !(state >> 32)) state = state << 32 | POP();
        int32_t symbol = symbols[rank];
        if (width == 1)
            ((uint8_t *)out)[i] = (uint8_t)symbol;
        else if (width == 2)
            ((int16_t *)out)[i] = (int16_t)symbol;
        else
            ((int32_t *)out)[i] = symbol;
    }
    return words == 0 && state == 0;
}
