#include "rotation.h"

#include <initializer_list>

namespace bitnet {

namespace {

// Sine and cosine in double precision with operations that every machine rounds alike (a libm may choose its code by
// CPU). Reduction by pi/2 in two parts and the polynomials of fdlibm's k_sin.c and k_cos.c; good to 2^20 radians.
void sine_cosine(double x, double* sine, double* cosine) {
    const int64_t quadrant = int64_t(x * 0.63661977236758134308 + 0.5);
    const double n = double(quadrant);
    const double r = (x - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;
    const double z = r * r;
    double s = 1.58969099521155010221e-10;
    for (double c : {-2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
                     8.33333333332248946124e-03, -1.66666666666666324348e-01})
        s = s * z + c;
    s = r + r * z * s;
    double c = -1.13596475577881948265e-11;
    for (double k : {2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
                     -1.38888888888741095749e-03, 4.16666666666666019037e-02})
        c = c * z + k;
    c = 1.0 - (0.5 * z - z * z * c);
    *sine = quadrant & 1 ? c : s;
    *cosine = quadrant & 1 ? s : c;
    if (quadrant & 2) *sine = -*sine;
    if ((quadrant + 1) & 2) *cosine = -*cosine;
}

}  // namespace

void rotation(int32_t position, const float* inverse_frequencies, int count, float* cosine, float* sine) {
    for (int j = 0; j < count; j++) {
        double s, c;
        sine_cosine(double(float(position) * inverse_frequencies[j]), &s, &c);
        cosine[j] = float(c);
        sine[j] = float(s);
    }
}

}  // namespace bitnet
