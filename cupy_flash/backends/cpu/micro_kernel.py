"""The outer product of vector registers: to the CPU what `mma` is to the GPU.

One product serves forward and backward, because tiles of scores are kept transposed,
[key, query] with the queries along the vector lanes:

    S^T = K Q^T    acc += P V    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ += dS K
"""

from collections import namedtuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ... import device
from ...plan.cpu import CHAIN, SLICE, VECTOR_BYTES, micro_kernel
from .jit import inlined, tile_function

MICRO = micro_kernel(device.cpu())
MICRO_ROWS, SHAPES = MICRO.rows, MICRO.shapes
DOT_KEYS = 6    # keys whose scores with one row are computed together


def _pointer(builder, base, offset, kind):
    """base + offset bytes as a pointer to `kind`."""
    p = builder.gep(builder.bitcast(base, ir.IntType(8).as_pointer()), [offset])
    return builder.bitcast(p, kind.as_pointer())


def _broadcast(builder, x, vector):
    """All lanes of `vector` = the scalar x."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(one, one, zeros)


# A matrix argument of an intrinsic as LLVM values; row, column: strides in bytes.
Matrix = namedtuple("Matrix", "data row column itemsize scalar vector")


def _unpacked(context, builder, signature, args):
    """The arguments, arrays as `Matrix`."""
    for kind, value in zip(signature.args, args, strict=True):
        if not isinstance(kind, types.Array):
            yield value
            continue
        array = context.make_array(kind)(context, builder, value)
        row, column = cgutils.unpack_tuple(builder, array.strides)
        itemsize = kind.dtype.bitwidth // 8
        scalar = context.get_value_type(kind.dtype)
        vector = ir.VectorType(scalar, VECTOR_BYTES // itemsize)
        yield Matrix(array.data, row, column, itemsize, scalar, vector)


def _load(builder, matrix, offset):
    """The vector at `offset` bytes."""
    return builder.load(
        _pointer(builder, matrix.data, offset, matrix.vector), align=matrix.itemsize
    )


def _accumulate(builder, cell, a, b):
    """cell += a * b for vectors, rounded once."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}f{8 * VECTOR_BYTES // kind.count}"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    builder.store(builder.call(fma, [a, b, builder.load(cell)]), cell)


def _make_micro_kernel(rows, vectors):
    """The product of `rows` rows by `vectors` vectors of columns."""

    @intrinsic
    def product(typingctx, c, a, b, i, j, first, end, accumulate, factor):
        """c[i:i+rows, J] (+)= a[i:i+rows, first:end] @ b[first:end, J], J = j:j+lanes*vectors.

        A product that is not added is multiplied by `factor`. `a` may have any strides (a
        transposed view costs nothing), rows of b and c unit stride.
        """

        def codegen(context, builder, signature, args):
            _emit_product(context, builder, signature, args, rows, vectors)
            return context.get_dummy_value()

        kinds = (types.intp,) * 4 + (types.boolean, c.dtype)
        return types.void(c, a, b, *kinds), codegen

    return product


def _emit_product(context, builder, signature, args, rows, vectors):
    """The instructions of a micro-kernel: sums in registers, stored once.

    Chains of CHAIN terms go to a total, and the total to what c held: a chain over d = 256 would
    have five times the rounding error of a BLAS product.
    """
    C, A, B, i, j, first, end, accumulate, factor = _unpacked(context, builder, signature, args)
    index, vector = context.get_value_type(types.intp), C.vector
    zero = ir.Constant(vector, None)
    columns = [
        builder.add(builder.mul(j, index(C.itemsize)), index(VECTOR_BYTES * n))
        for n in range(vectors)
    ]
    lines = [builder.add(i, index(r)) for r in range(rows)]
    a_rows = [_pointer(builder, A.data, builder.mul(r, A.row), C.scalar) for r in lines]
    cells = [
        _pointer(builder, C.data, builder.add(builder.mul(r, C.row), n), vector)
        for r in lines
        for n in columns
    ]
    # SROA makes registers of these.
    total = [cgutils.alloca_once_value(builder, zero) for _ in cells]
    acc = [cgutils.alloca_once_value(builder, zero) for _ in cells]
    with cgutils.for_range_slice(builder, first, end, index(CHAIN)) as (start, _):
        rest = builder.sub(end, start)
        short = builder.icmp_signed("<", rest, index(CHAIN))
        for c_acc in acc:
            builder.store(zero, c_acc)
        with cgutils.for_range(builder, builder.select(short, rest, index(CHAIN))) as loop:
            k = builder.add(start, loop.index)
            b_row, a_column = builder.mul(k, B.row), builder.mul(k, A.column)
            b_vectors = [_load(builder, B, builder.add(b_row, n)) for n in columns]
            for r, a_row in enumerate(a_rows):
                x = builder.load(_pointer(builder, a_row, a_column, C.scalar))
                a_vector = _broadcast(builder, x, vector)
                for n, b_vector in enumerate(b_vectors):
                    _accumulate(builder, acc[r * vectors + n], a_vector, b_vector)
        for c_acc, c_total in zip(acc, total, strict=True):
            builder.store(builder.fadd(builder.load(c_total), builder.load(c_acc)), c_total)
    with builder.if_else(accumulate) as (add, put):
        with add:
            for cell, c_total in zip(cells, total, strict=True):
                x = builder.fadd(builder.load(cell, align=C.itemsize), builder.load(c_total))
                builder.store(x, cell, align=C.itemsize)
        with put:
            factors = _broadcast(builder, factor, vector)
            for cell, c_total in zip(cells, total, strict=True):
                x = builder.fmul(builder.load(c_total), factors)
                builder.store(x, cell, align=C.itemsize)


def _make_dot_kernel(keys):
    """Scores of one query row with `keys` keys: the depth lies along the lanes."""

    @intrinsic
    def dot_kernel(typingctx, s, k, q, j, i, depth, factor):
        """s[j:j+keys, i] = factor * k[j:j+keys, :depth] @ q[i, :depth], depth in whole vectors."""

        def codegen(context, builder, signature, args):
            _emit_dots(context, builder, signature, args, keys)
            return context.get_dummy_value()

        return types.void(s, k, q, types.intp, types.intp, types.intp, s.dtype), codegen

    return dot_kernel


def _emit_dots(context, builder, signature, args, keys):
    """The instructions of a dot kernel: a vector of partial sums per key, added up at the end."""
    S, K, Q, j, i, depth, factor = _unpacked(context, builder, signature, args)
    index, vector = context.get_value_type(types.intp), S.vector
    name = f"llvm.vector.reduce.fadd.v{vector.count}f{8 * S.itemsize}"
    kind = ir.FunctionType(S.scalar, [S.scalar, vector])
    add_up = cgutils.get_or_insert_function(builder.module, kind, name)
    lines = [builder.add(j, index(n)) for n in range(keys)]
    acc = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in lines]
    with cgutils.for_range_slice(builder, index(0), depth, index(vector.count)) as (c, _):
        column = builder.mul(c, index(S.itemsize))
        q_vector = _load(builder, Q, builder.add(builder.mul(i, Q.row), column))
        for line, cell in zip(lines, acc, strict=True):
            k_at = builder.add(builder.mul(line, K.row), column)
            _accumulate(builder, cell, _load(builder, K, k_at), q_vector)
    for line, cell in zip(lines, acc, strict=True):
        # `reassoc` lets LLVM add the lanes as a tree; the order is fixed all the same.
        zero = ir.Constant(S.scalar, 0)
        x = builder.call(add_up, [zero, builder.load(cell)], fastmath=("reassoc",))
        at = builder.add(builder.mul(line, S.row), builder.mul(i, S.column))
        builder.store(builder.fmul(x, factor), _pointer(builder, S.data, at, S.scalar))


_row_kernel, _narrow_row_kernel = _make_micro_kernel(1, 4), _make_micro_kernel(1, 1)
_dot_kernel, _single_dot_kernel = _make_dot_kernel(DOT_KEYS), _make_dot_kernel(1)


@tile_function
def matmul(c, a, b, rows, columns, depth, factor):
    """c[:rows, :columns] = factor * (a[:rows, :depth] @ b[:depth, :columns]).

    Rows are rounded up to MICRO_ROWS and columns to whole vectors: c, and the rows of a and b,
    must reach so far. What lies in the surplus of a and b reaches the surplus of c only.
    """
    _tiled_product(c, a, b, rows, columns, 0, depth, False, factor)


@tile_function
def add_matmul(c, a, b, rows, columns, depth):
    """c[:rows, :columns] += a[:rows, :depth] @ b[:depth, :columns], rounded up as in `matmul`."""
    for first in range(0, depth, SLICE):
        end = min(first + SLICE, depth)
        _tiled_product(c, a, b, rows, columns, first, end, True, c.dtype.type(1))


def _make_columns(rows_at_once, vectors):
    """The part of a product that whole groups of so many vectors cover."""
    kernel = _make_micro_kernel(rows_at_once, vectors)

    @inlined
    def product(c, a, b, rows, j, columns, first, end, accumulate, factor):
        """Of the columns from j on; returns the first one that is left."""
        lanes = VECTOR_BYTES // c.itemsize
        whole = (columns - j + lanes - 1) // lanes // vectors
        for n in range(whole):
            for i in range(0, rows, rows_at_once):
                kernel(c, a, b, i, j + n * vectors * lanes, first, end, accumulate, factor)
        return j + whole * vectors * lanes

    return product


_widest_columns, *_others = (_make_columns(*shape) for shape in SHAPES)
FURTHER_SHAPES = bool(_others)
if FURTHER_SHAPES:
    _narrower_columns, _last_column = _others


@tile_function
def _tiled_product(c, a, b, rows, columns, first, end, accumulate, factor):
    """The product cut into micro-kernels."""
    j = _widest_columns(c, a, b, rows, 0, columns, first, end, accumulate, factor)
    if FURTHER_SHAPES:
        j = _narrower_columns(c, a, b, rows, j, columns, first, end, accumulate, factor)
        _last_column(c, a, b, rows, j, columns, first, end, accumulate, factor)


@tile_function
def few_scores(S, k, q, rows, keys, depth, scale):
    """S[:keys, :rows] = scale * (k[:keys, :depth] @ q[:rows, :depth].T), for fewer rows than
    `matmul` is for.

    Columns of k and q up to the next whole vector are read, and must be 0 in one and finite in the
    other.
    """
    whole = keys // DOT_KEYS * DOT_KEYS
    for i in range(rows):
        for j in range(0, whole, DOT_KEYS):
            _dot_kernel(S, k, q, j, i, depth, scale)
        for j in range(whole, keys):
            _single_dot_kernel(S, k, q, j, i, depth, scale)


@tile_function
def few_products(acc, P, v, rows, columns, keys):
    """acc[:rows, :columns] += P[:rows, :keys] @ v[:keys, :columns], columns in whole vectors.

    """
    lanes = VECTOR_BYTES // acc.itemsize
    wide = columns // (4 * lanes) * (4 * lanes)
    one = acc.dtype.type(1)
    for first in range(0, keys, SLICE):
        end = min(first + SLICE, keys)
        for i in range(rows):
            for j in range(0, wide, 4 * lanes):
                _row_kernel(acc, P, v, i, j, first, end, True, one)
            for j in range(wide, columns, lanes):
                _narrow_row_kernel(acc, P, v, i, j, first, end, True, one)
