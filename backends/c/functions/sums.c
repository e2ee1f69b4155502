/// convolution: X W B Y
/* Section 6: acc = Σ x · w + b over the window and the channels of the group. */
static void convolution(ptrdiff_t batch, ptrdiff_t in_channels, ptrdiff_t out_channels, ptrdiff_t groups, const struct window *w,
                        const X *x, const W *weight, const B *bias, Y *y)
{
    const ptrdiff_t each = in_channels / groups, plane = w->in[0] * w->in[1] * w->in[2];
    const ptrdiff_t taps = w->kernel[0] * w->kernel[1] * w->kernel[2];
    for (ptrdiff_t n = 0; n < batch; n++)
        for (ptrdiff_t o = 0; o < out_channels; o++)
            for (ptrdiff_t pz = 0; pz < w->out[0]; pz++)
                for (ptrdiff_t py = 0; py < w->out[1]; py++)
                    for (ptrdiff_t px = 0; px < w->out[2]; px++) {
                        Y sum = bias ? (Y)bias[o] : 0;
                        for (ptrdiff_t c = 0; c < each; c++) {
                            const X *from = x + (n * in_channels + o / (out_channels / groups) * each + c) * plane;
                            const W *factor = weight + (o * each + c) * taps;
                            for (ptrdiff_t kz = 0; kz < w->kernel[0]; kz++) {
                                const ptrdiff_t z = tap(w, 0, pz, kz);
                                for (ptrdiff_t ky = 0; ky < w->kernel[1]; ky++) {
                                    const ptrdiff_t row = tap(w, 1, py, ky);
                                    for (ptrdiff_t kx = 0; kx < w->kernel[2]; kx++, factor++) {
                                        const ptrdiff_t column = tap(w, 2, px, kx);
                                        if (z >= 0 && row >= 0 && column >= 0)
                                            sum += (Y)from[(z * w->in[1] + row) * w->in[2] + column] * (Y)*factor;
                                    }
                                }
                            }
                        }
                        *y++ = sum;
                    }
}

/// transposed_convolution: X W B Y
/* Section 16: the sum of section 6 over the taps that meet each output. `in` and `out` of the window are those of this operator. */
static void transposed_convolution(ptrdiff_t batch, ptrdiff_t in_channels, ptrdiff_t out_channels, ptrdiff_t groups,
                                   const struct window *w, const X *x, const W *weight, const B *bias, Y *y)
{
    const ptrdiff_t each = in_channels / groups, made = out_channels / groups;
    const ptrdiff_t plane = w->in[0] * w->in[1] * w->in[2], taps = w->kernel[0] * w->kernel[1] * w->kernel[2];
    for (ptrdiff_t n = 0; n < batch; n++)
        for (ptrdiff_t o = 0; o < out_channels; o++)
            for (ptrdiff_t p = 0; p < w->out[0] * w->out[1] * w->out[2]; p++) {
                const ptrdiff_t out[3] = {p / (w->out[1] * w->out[2]), p / w->out[2] % w->out[1], p % w->out[2]};
                Y sum = bias ? (Y)bias[o] : 0;
                for (ptrdiff_t k = 0; k < taps; k++) {
                    const ptrdiff_t of[3] = {k / (w->kernel[1] * w->kernel[2]), k / w->kernel[2] % w->kernel[1], k % w->kernel[2]};
                    ptrdiff_t from = 0;
                    for (int d = 0; d < 3 && from >= 0; d++) {
                        const ptrdiff_t at = out[d] + w->before[d] - of[d] * w->dilation[d];
                        const int meets = at >= 0 && at % w->stride[d] == 0 && at / w->stride[d] < w->in[d];
                        from = meets ? from * w->in[d] + at / w->stride[d] : -1;
                    }
                    for (ptrdiff_t c = o / made * each; from >= 0 && c < (o / made + 1) * each; c++)
                        sum += (Y)x[(n * in_channels + c) * plane + from] * (Y)weight[(c * made + o % made) * taps + k];
                }
                *y++ = sum;
            }
}

/// linear: X W B Y
/* Section 6 over the last dimension. */
static void linear(ptrdiff_t rows, ptrdiff_t terms, ptrdiff_t columns, const X *x, const W *weight, const B *bias, Y *y)
{
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t o = 0; o < columns; o++) {
            Y sum = bias ? (Y)bias[o] : 0;
            for (ptrdiff_t k = 0; k < terms; k++) sum += (Y)x[i * terms + k] * (Y)weight[o * terms + k];
            *y++ = sum;
        }
}

/// dynamic_linear: W
/* Section 22: float(Σ c · w) · (s_x · s_w) + b, where c, s_x and z are those of x; `step` is 0 where one s_w is for all. */
static void dynamic_linear(ptrdiff_t rows, ptrdiff_t terms, ptrdiff_t columns, const float *x, const W *weight, const float *scale,
                           ptrdiff_t step, const float *bias, float *y)
{
    float low = 0.0f, high = 0.0f;
    for (ptrdiff_t i = 0; i < rows * terms; i++) {
        const float v = considered(x[i]);
        if (v < low) low = v;
        if (v > high) high = v;
    }
    const float range = high - low;
    const float own = high == low ? 1.0f : range / 255.0f;
    const float quotient = low / own;
    const int32_t zero = (int32_t)clip(half_even(-quotient), 0, 255);
    for (ptrdiff_t i = 0; i < rows; i++, x += terms, y += columns)
        for (ptrdiff_t o = 0; o < columns; o++) {
            int32_t sum = 0;
            for (ptrdiff_t k = 0; k < terms; k++) {
                const float steps = considered(x[k]) / own;
                sum += (int32_t)clip(half_even(steps), -zero, 255 - zero) * weight[o * terms + k];
            }
            const float factor = own * scale[o * step], total = (float)sum;
            const float product = total * factor;
            y[o] = bias ? product + bias[o] : product;
        }
}

/// matrix_product: A B Y
/* Section 16: Σ a · b over the last two dimensions. */
static void matrix_product(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *a_step, const ptrdiff_t *b_step,
                           ptrdiff_t rows, ptrdiff_t terms, ptrdiff_t columns, const A *first, const B *second, Y *y)
{
    for (ptrdiff_t m = 0; m < count; m++) {
        const A *a = first + place(m, rank, size, a_step);
        const B *b = second + place(m, rank, size, b_step);
        for (ptrdiff_t i = 0; i < rows; i++)
            for (ptrdiff_t j = 0; j < columns; j++) {
                Y sum = 0;
                for (ptrdiff_t k = 0; k < terms; k++) sum += (Y)a[i * terms + k] * (Y)b[k * columns + j];
                *y++ = sum;
            }
    }
}

/// transform: X M Y
/* Σ m[i][j] · x[j] along one dimension. */
static void transform(ptrdiff_t outer, ptrdiff_t terms, ptrdiff_t rows, ptrdiff_t inner, const X *x, const M *matrix, Y *y)
{
    for (ptrdiff_t n = 0; n < outer; n++)
        for (ptrdiff_t i = 0; i < rows; i++)
            for (ptrdiff_t p = 0; p < inner; p++) {
                Y sum = 0;
                for (ptrdiff_t j = 0; j < terms; j++) sum += (Y)x[(n * terms + j) * inner + p] * (Y)matrix[i * terms + j];
                *y++ = sum;
            }
}

/// resize_linear: X M Y
/* Section 16, linear resize: floor(Σ rows · x · columns / 2^bits + 1/2); an axis without weights stays as it is.
   Without the half where it rounds down. */
static void resize_linear(ptrdiff_t planes, ptrdiff_t height, ptrdiff_t width, ptrdiff_t out_height, ptrdiff_t out_width, const X *x,
                          const M *rows, const M *columns, int bits, int nearest, Y *y)
{
    for (ptrdiff_t n = 0; n < planes; n++, x += height * width)
        for (ptrdiff_t i = 0; i < out_height; i++)
            for (ptrdiff_t j = 0; j < out_width; j++) {
                int64_t sum = 0;
                for (ptrdiff_t a = 0; a < height; a++) {
                    const int64_t down = rows ? (int64_t)rows[i * height + a] : a == i;
                    for (ptrdiff_t b = 0; down != 0 && b < width; b++)
                        sum += down * (columns ? (int64_t)columns[j * width + b] : b == j) * x[a * width + b];
                }
                *y++ = (Y)floor_shift(sum + (nearest ? (int64_t)1 << (bits - 1) : 0), bits);
            }
}

/// max_pool: X Y
/* Section 14: the largest element of each window; padding never wins. */
static void max_pool(ptrdiff_t planes, const struct window *w, const X *x, Y *y)
{
    const ptrdiff_t plane = w->in[0] * w->in[1] * w->in[2];
    for (ptrdiff_t n = 0; n < planes; n++, x += plane)
        for (ptrdiff_t p = 0; p < w->out[0] * w->out[1] * w->out[2]; p++) {
            int found = 0;
            Y best = 0;
            for (ptrdiff_t k = 0; k < w->kernel[0] * w->kernel[1] * w->kernel[2]; k++) {
                const ptrdiff_t z = tap(w, 0, p / (w->out[1] * w->out[2]), k / (w->kernel[1] * w->kernel[2]));
                const ptrdiff_t row = tap(w, 1, p / w->out[2] % w->out[1], k / w->kernel[2] % w->kernel[1]);
                const ptrdiff_t column = tap(w, 2, p % w->out[2], k % w->kernel[2]);
                if (z < 0 || row < 0 || column < 0) continue;
                const Y q = (Y)x[(z * w->in[1] + row) * w->in[2] + column];
                if (!found || q > best) best = q;
                found = 1;
            }
            *y++ = best;
        }
}

/// sum_pool: X Y
/* Section 15: Σ q over each window, padding counting as 0. */
static void sum_pool(ptrdiff_t planes, const struct window *w, const X *x, Y *y)
{
    const ptrdiff_t plane = w->in[0] * w->in[1] * w->in[2];
    for (ptrdiff_t n = 0; n < planes; n++, x += plane)
        for (ptrdiff_t p = 0; p < w->out[0] * w->out[1] * w->out[2]; p++) {
            Y sum = 0;
            for (ptrdiff_t k = 0; k < w->kernel[0] * w->kernel[1] * w->kernel[2]; k++) {
                const ptrdiff_t z = tap(w, 0, p / (w->out[1] * w->out[2]), k / (w->kernel[1] * w->kernel[2]));
                const ptrdiff_t row = tap(w, 1, p / w->out[2] % w->out[1], k / w->kernel[2] % w->kernel[1]);
                const ptrdiff_t column = tap(w, 2, p % w->out[2], k % w->kernel[2]);
                if (z >= 0 && row >= 0 && column >= 0) sum += (Y)x[(z * w->in[1] + row) * w->in[2] + column];
            }
            *y++ = sum;
        }
}

/// pool_indices: X
/* Section 15: where in its plane the first of the largest elements of each window lies, row by row. */
static void pool_indices(ptrdiff_t planes, const struct window *w, const X *x, const int64_t *places, int64_t *y)
{
    const ptrdiff_t plane = w->in[0] * w->in[1] * w->in[2];
    for (ptrdiff_t n = 0; n < planes; n++, x += plane)
        for (ptrdiff_t p = 0; p < w->out[0] * w->out[1] * w->out[2]; p++) {
            ptrdiff_t best = -1;
            for (ptrdiff_t k = 0; k < w->kernel[0] * w->kernel[1] * w->kernel[2]; k++) {
                const ptrdiff_t z = tap(w, 0, p / (w->out[1] * w->out[2]), k / (w->kernel[1] * w->kernel[2]));
                const ptrdiff_t row = tap(w, 1, p / w->out[2] % w->out[1], k / w->kernel[2] % w->kernel[1]);
                const ptrdiff_t column = tap(w, 2, p % w->out[2], k % w->kernel[2]);
                if (z < 0 || row < 0 || column < 0) continue;
                const ptrdiff_t at = (z * w->in[1] + row) * w->in[2] + column;
                if (best < 0 || x[at] > x[best]) best = at;
            }
            *y++ = places ? places[best] : best;
        }
}

/// REDUCE: X Y
/* DOCUMENT */
static void REDUCE(ptrdiff_t count, int rank, const ptrdiff_t *size, const ptrdiff_t *step, ptrdiff_t terms, int along,
                   const ptrdiff_t *along_size, const ptrdiff_t *along_step, const X *x, Y *y)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const X *from = x + place(i, rank, size, step);
        Y total = START;
        for (ptrdiff_t k = 0; k < terms; k++) {
            const X q = from[place(k, along, along_size, along_step)];
            total = (Y)(EXPRESSION);
        }
        y[i] = total;
    }
}

/// running: X
/* The sum of the integers up to each one along a dimension, modulo 2^64. */
static void running(ptrdiff_t outer, ptrdiff_t terms, ptrdiff_t inner, const X *x, int64_t *y)
{
    for (ptrdiff_t n = 0; n < outer; n++)
        for (ptrdiff_t p = 0; p < inner; p++) {
            int64_t sum = 0;
            for (ptrdiff_t k = 0; k < terms; k++) {
                sum = wrapped((uint64_t)sum + (uint64_t)(int64_t)x[(n * terms + k) * inner + p]);
                y[(n * terms + k) * inner + p] = sum;
            }
        }
}
