/// moved: X
/* Section 16: the elements in another order, some of them, or some of them several times. */
static void moved(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, const X *x, X *y)
{
    for (ptrdiff_t i = 0; i < count; i++) y[i] = x[place(i, rank, size, step)];
}

/// concatenate: X
/* Section 12: one of the tensors that are joined, into its part of the result. */
static void concatenate(ptrdiff_t outer, ptrdiff_t length, ptrdiff_t stride, const X *x, X *y)
{
    for (ptrdiff_t n = 0; n < outer; n++)
        for (ptrdiff_t i = 0; i < length; i++) y[n * stride + i] = x[n * length + i];
}

/// pad: X
/* Section 16: a tensor with a number around it. */
static void pad(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *begin, const ptrdiff_t *in, X value, const X *x, X *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t rest = i, from = 0, step = 1;
        int within = 1;
        for (int d = rank - 1; d >= 0; d--) {
            const ptrdiff_t at = rest % size[d] - begin[d];
            rest /= size[d];
            within = within && at >= 0 && at < in[d];
            from += at * step;
            step *= in[d];
        }
        y[i] = within ? x[from] : value;
    }
}

/// pick: X I
/* The slices at these places along a dimension; negative ones count from the end. 1 where there is none. */
static int pick(ptrdiff_t outer, ptrdiff_t terms, ptrdiff_t inner, ptrdiff_t chosen, const X *x, const I *index, X *y)
{
    for (ptrdiff_t n = 0; n < outer; n++)
        for (ptrdiff_t k = 0; k < chosen; k++) {
            const ptrdiff_t at = index[k] < 0 ? (ptrdiff_t)index[k] + terms : (ptrdiff_t)index[k];
            if (at < 0 || at >= terms) return 1;
            for (ptrdiff_t p = 0; p < inner; p++) *y++ = x[(n * terms + at) * inner + p];
        }
    return 0;
}

/// take_along: X I
/* The element that the index says along a dimension, at each of its places. 1 where there is none. */
static int take_along(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, ptrdiff_t terms, ptrdiff_t stride,
                      const X *x, const I *index, X *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= terms) return 1;
        y[i] = x[place(i, rank, size, step) + (ptrdiff_t)index[i] * stride];
    }
    return 0;
}

/// put_along: X S I
/* The tensor, with the elements of a source where the index says along a dimension. 1 where there is no such place. */
static int put_along(ptrdiff_t whole, ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step,
                     const ptrdiff_t *source_step, ptrdiff_t terms, ptrdiff_t stride, const X *x, const S *source, const I *index, X *y)
{
    for (ptrdiff_t i = 0; i < whole; i++) y[i] = x[i];
    for (ptrdiff_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= terms) return 1;
        y[place(i, rank, size, step) + (ptrdiff_t)index[i] * stride] = (X)source[place(i, rank, size, source_step)];
    }
    return 0;
}

/// sum_along: X I Y
/* Section 16: Σ of the elements that have each place along a dimension. 1 where there is no such place. */
static int sum_along(ptrdiff_t whole, ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, ptrdiff_t terms,
                     ptrdiff_t stride, const X *x, const I *index, Y *y)
{
    for (ptrdiff_t i = 0; i < whole; i++) y[i] = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= terms) return 1;
        y[place(i, rank, size, step) + (ptrdiff_t)index[i] * stride] += (Y)x[i];
    }
    return 0;
}

/// extremum_along: X I
/* The largest, or smallest, of an element and those of a source that have its place along a dimension. 1 where there is no such place. */
static int extremum_along(ptrdiff_t whole, ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, ptrdiff_t terms,
                          ptrdiff_t stride, int largest, const X *x, const X *source, const I *index, X *y)
{
    for (ptrdiff_t i = 0; i < whole; i++) y[i] = x[i];
    for (ptrdiff_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= terms) return 1;
        X *at = y + place(i, rank, size, step) + (ptrdiff_t)index[i] * stride;
        if (largest ? source[i] > *at : source[i] < *at) *at = source[i];
    }
    return 0;
}

/// unpool: X
/* Planes with each element at its position, and a number elsewhere. 1 where there is no such position. */
static int unpool(ptrdiff_t planes, ptrdiff_t each, ptrdiff_t count, X outside, const X *x, const int64_t *index, X *y)
{
    for (ptrdiff_t i = 0; i < planes * count; i++) y[i] = outside;
    for (ptrdiff_t i = 0; i < planes * each; i++) {
        if (index[i] < 0 || index[i] >= count) return 1;
        y[i / each * count + (ptrdiff_t)index[i]] = x[i];
    }
    return 0;
}

/// arg_extremum: X
/* Where the first of the largest, or smallest, elements along a dimension is. */
static void arg_extremum(ptrdiff_t outer, ptrdiff_t terms, ptrdiff_t inner, int largest, const X *x, int64_t *y)
{
    for (ptrdiff_t n = 0; n < outer; n++)
        for (ptrdiff_t p = 0; p < inner; p++) {
            const X *from = x + n * terms * inner + p;
            ptrdiff_t best = 0;
            for (ptrdiff_t k = 1; k < terms; k++)
                if (largest ? from[k * inner] > from[best * inner] : from[k * inner] < from[best * inner]) best = k;
            *y++ = best;
        }
}

/// ranking: X
/* Where the first `kept` elements along a dimension are, the largest or the smallest first; of equal ones the first comes first. */
static void ranking(ptrdiff_t outer, ptrdiff_t terms, ptrdiff_t inner, ptrdiff_t kept, int largest, const X *x, int64_t *y)
{
    for (ptrdiff_t n = 0; n < outer; n++)
        for (ptrdiff_t p = 0; p < inner; p++) {
            const X *from = x + n * terms * inner + p;
            for (ptrdiff_t k = 0; k < terms; k++) {
                const X q = from[k * inner];
                ptrdiff_t before = 0;
                for (ptrdiff_t j = 0; j < terms; j++) {
                    const X other = from[j * inner];
                    before += other == q ? j < k : largest ? other > q : other < q;
                }
                if (before < kept) y[(n * kept + before) * inner + p] = k;
            }
        }
}

/// sample: X C
/* Section 16, reading between pixels: floor(Σ w · q / 2^(rank · bits) + 1/2), or the nearest pixel. mode as for `inside`. */
static void sample(ptrdiff_t batch, ptrdiff_t channels, int rank, const ptrdiff_t *size, ptrdiff_t positions, int bits, int nearest,
                   int mode, int corners, int64_t outside, const X *x, const C *where, X *y)
{
    ptrdiff_t plane = 1;
    for (int d = 0; d < rank; d++) plane *= size[d];
    for (ptrdiff_t n = 0; n < batch; n++)
        for (ptrdiff_t c = 0; c < channels; c++)
            for (ptrdiff_t p = 0; p < positions; p++) {
                int64_t sum = 0;
                for (int corner = 0; corner < (nearest ? 1 : 1 << rank); corner++) {
                    ptrdiff_t from = 0;
                    int64_t weight = 1;
                    for (int d = 0; d < rank; d++) {
                        const int64_t at = inside((int64_t)where[(n * positions + p) * rank + rank - 1 - d], size[d], bits, mode, corners);
                        const int64_t pixel = (int64_t)1 << bits, first = floor_shift(at, bits), beyond = at - first * pixel;
                        const int second = corner >> (rank - 1 - d) & 1;
                        int64_t index = first + second;
                        if (nearest) index = half_even((double)at / (double)pixel);
                        else weight *= second ? beyond : pixel - beyond;
                        if (mode != 0) index = clip(index, 0, size[d] - 1);
                        from = from >= 0 && index >= 0 && index < size[d] ? from * size[d] + (ptrdiff_t)index : -1;
                    }
                    sum += weight * (from < 0 ? outside : (int64_t)x[(n * channels + c) * plane + from]);
                }
                *y++ = (X)(nearest ? sum : floor_shift(sum + ((int64_t)1 << (rank * bits - 1)), rank * bits));
            }
}
