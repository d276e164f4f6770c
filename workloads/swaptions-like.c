/* A stand-in for swaptions of the PARSEC suite: prices of options on interest-rate swaps by simulation.
 *
 * Kept: a portfolio divided into one part for each thread, and trials that each draw random shocks and
 * simulate a forward curve in the Heath-Jarrow-Morton framework. A trial allocates its small matrices and
 * vectors like Numerical Recipes' routines (one block of row pointers, one of numbers), and frees them: nine
 * blocks of 24 bytes to 1 KiB for a microsecond or two of work, in every thread at once. Memory in use stays
 * at a few MiB (the Ptlbmalloc2 paper's section 7.2 reports 4 MB), so hardly any memory is returned. Left
 * out: the market's data, calibration, and the normal distribution's exact inverse (replaced by a sum of
 * uniform numbers). After: Bienia et al., "The PARSEC Benchmark Suite: Characterization and Architectural
 * Implications" (2008), the section on swaptions. Written from that description; shares no code with the
 * program. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "swaptions-like";

struct portfolio {
    unsigned long threads;
    unsigned long swaptions;
    unsigned long trials;
    unsigned long steps;
    unsigned long factors;
    double *prices;
};

static double *new_vector(unsigned long count) {
    return checked(calloc(count, sizeof(double)), program_name);
}

static double **new_matrix(unsigned long rows, unsigned long columns) {
    double **matrix = checked(malloc(rows * sizeof(double *)), program_name);
    matrix[0] = new_vector(rows * columns);
    for (unsigned long i = 1; i < rows; i++) {
        matrix[i] = matrix[i - 1] + columns;
    }
    return matrix;
}

static void drop_matrix(double **matrix) {
    free(matrix[0]);
    free(matrix);
}

/* Twelve uniform numbers less 6 have the mean 0, the variance 1, and very nearly a normal shape. */
static double normal(unsigned long long *random) {
    double sum = -6;
    for (int i = 0; i < 4; i++) {
        unsigned long long three = random_next(random);
        sum += (double)(three & 0x1fffff) / 0x200000 + (double)((three >> 21) & 0x1fffff) / 0x200000 +
               (double)((three >> 42) & 0x1fffff) / 0x200000;
    }
    return sum;
}

/* Volatility of a factor for a forward rate that is so far away. */
static double volatility(unsigned long factor, unsigned long distance) {
    return 0.01 / (double)(1 + factor) / (1 + 0.1 * (double)distance);
}

/* The no-arbitrage condition: what the volatilities say of the drift. */
static void find_drifts(const struct portfolio *portfolio, double **drifts) {
    for (unsigned long f = 0; f < portfolio->factors; f++) {
        double sum = 0;
        for (unsigned long j = 0; j < portfolio->steps; j++) {
            double here = volatility(f, j);
            drifts[f][j] = here * (sum + here / 2);
            sum += here;
        }
    }
}

/* Row t is the forward curve after t steps of a year. */
static void simulate_path(const struct portfolio *portfolio, double **drifts, double **shocks,
                          const double *curve, double **path) {
    memcpy(path[0], curve, portfolio->steps * sizeof(double));
    for (unsigned long t = 1; t < portfolio->steps; t++) {
        for (unsigned long j = 0; j + t < portfolio->steps; j++) {
            double rate = path[t - 1][j + 1];
            for (unsigned long f = 0; f < portfolio->factors; f++) {
                rate += drifts[f][j] + volatility(f, j) * shocks[f][t];
            }
            path[t][j] = rate;
        }
    }
}

/* What the option to pay the strike and receive the floating rate is worth today, on this path. */
static double payoff(const struct portfolio *portfolio, double **path, double strike) {
    unsigned long expiry = portfolio->steps / 2;
    double *discounts = new_vector(portfolio->steps);
    double *legs = new_vector(portfolio->steps);
    double to_expiry = 1;
    for (unsigned long t = 0; t < expiry; t++) {
        to_expiry /= 1 + path[t][0];
    }
    double discount = 1;
    double value = 0;
    for (unsigned long j = 0; j + expiry < portfolio->steps; j++) {
        discount /= 1 + path[expiry][j];
        discounts[j] = discount;
        legs[j] = path[expiry][j] - strike;
        value += discounts[j] * legs[j];
    }
    free(legs);
    free(discounts);
    return value > 0 ? value * to_expiry : 0;
}

static double one_trial(const struct portfolio *portfolio, double strike, unsigned long long *random) {
    double *curve = new_vector(portfolio->steps);
    double **shocks = new_matrix(portfolio->factors, portfolio->steps);
    double **drifts = new_matrix(portfolio->factors, portfolio->steps);
    double **path = new_matrix(portfolio->steps, portfolio->steps);
    for (unsigned long j = 0; j < portfolio->steps; j++) {
        curve[j] = 0.04 + 0.001 * (double)j;
    }
    for (unsigned long f = 0; f < portfolio->factors; f++) {
        for (unsigned long t = 0; t < portfolio->steps; t++) {
            shocks[f][t] = normal(random);
        }
    }
    find_drifts(portfolio, drifts);
    simulate_path(portfolio, drifts, shocks, curve, path);
    double value = payoff(portfolio, path, strike);
    drop_matrix(path);
    drop_matrix(drifts);
    drop_matrix(shocks);
    free(curve);
    return value;
}

static void price_part(unsigned long thread, void *shared) {
    const struct portfolio *portfolio = shared;
    unsigned long begin = portfolio->swaptions * thread / portfolio->threads;
    unsigned long end = portfolio->swaptions * (thread + 1) / portfolio->threads;
    for (unsigned long s = begin; s < end; s++) {
        double strike = 0.04 + 0.02 * (double)s / (double)portfolio->swaptions;
        unsigned long long random = s;
        double sum = 0;
        for (unsigned long trial = 0; trial < portfolio->trials; trial++) {
            sum += one_trial(portfolio, strike, &random);
        }
        portfolio->prices[s] = sum / (double)portfolio->trials;
    }
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long swaptions = 64;
    unsigned long trials = 40000;
    unsigned long steps = 11;
    unsigned long factors = 3;
    const struct option_spec options[] = {
        {"threads", "threads, each with a part of the portfolio", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"swaptions", "swaptions in the portfolio", OPTION_COUNT, &swaptions, 1, 1000000, NULL},
        {"trials", "simulations of each", OPTION_COUNT, &trials, 1, 1000000000, NULL},
        {"steps", "years of a path", OPTION_COUNT, &steps, 2, 1000, NULL},
        {"factors", "sources of chance", OPTION_COUNT, &factors, 1, 100, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads price options by simulation, with small matrices for each trial.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct portfolio portfolio = {threads, swaptions, trials, steps, factors, new_vector(swaptions)};
    double seconds = run_threads(program_name, threads, price_part, &portfolio);

    unsigned long long checksum = 0;
    double sum = 0;
    for (unsigned long s = 0; s < swaptions; s++) {
        sum += portfolio.prices[s];
        checksum = checksum_add(checksum, (unsigned long long)(portfolio.prices[s] * 1e9 + 0.5));
    }
    free(portfolio.prices);
    printf("{\"workload\": \"swaptions-like\", \"threads\": %lu, \"swaptions\": %lu, \"trials\": %lu, "
           "\"steps\": %lu, \"factors\": %lu, \"mean_price\": %.9f, \"checksum\": \"%016llx\", "
           "\"seconds\": %.6f}\n",
           threads, swaptions, trials, steps, factors, sum / (double)swaptions, checksum, seconds);
    return 0;
}
