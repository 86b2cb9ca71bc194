//! A template as a tree: parsed by `minijinja`, checked, and owned.
//!
//! ```text
//! source ──newlines──► one kind ──tags──► {% generation %} as a call block ──minijinja──► its tree ──► our tree
//! ```
//!
//! Only the parser of `minijinja` is used. Its engine has values of its own, which print, compare
//! and look up names in other ways than Python's. Invariants: what Jinja2 knows and this tree does not is refused here,
//! by name and line; every string and space is the one that Jinja2 sees.

use super::methods::{self, Filter, Test};
use super::operators::Binary;
use super::value::Name;
use minijinja::machinery::ast::{self, BinOpKind, CallArg, CompareOpKind, UnaryOpKind};
use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The function that the call block of a `{% generation %}` calls.
const GENERATION: &str = "__generation__";

pub struct Program {
    pub body: Vec<Stmt>,
    pub names: HashMap<Arc<str>, Name>,
    pub macros: Vec<Macro>,
    /// Whether there is a `{% generation %}`.
    pub generates: bool,
    /// Names that an inner scope reads before the scope around it sets them. There Jinja2 finds
    /// nothing, even if the context has the name.
    pub late: HashSet<Name>,
}

pub enum Stmt {
    Text(Arc<str>),
    Emit(Expr),
    For(Box<For>),
    If(Expr, Vec<Stmt>, Vec<Stmt>),
    With(Vec<(Target, Expr)>, Vec<Stmt>),
    Set(Target, Expr),
    SetBlock(Target, Vec<Apply>, Vec<Stmt>),
    FilterBlock(Vec<Apply>, Vec<Stmt>),
    /// The name of a macro, and its number in [`Program::macros`].
    Macro(Name, usize),
    /// A call, and the number of the macro that it gets as `caller`.
    Call(Expr, usize),
    Generation(Vec<Stmt>),
    Continue,
    Break,
}

pub struct For {
    pub target: Target,
    pub iter: Expr,
    pub filter: Option<Expr>,
    pub body: Vec<Stmt>,
    pub otherwise: Vec<Stmt>,
}

pub struct Macro {
    pub name: Arc<str>,
    pub params: Vec<(Name, Arc<str>, Option<Expr>)>,
    pub body: Vec<Stmt>,
    /// The variable `caller`, if the body uses it.
    pub caller: Option<Name>,
}

pub enum Target {
    Name(Name),
    Attr(Name, Arc<str>),
    All(Vec<Target>),
}

/// A filter with its arguments, to apply to a value.
pub struct Apply {
    pub filter: Filter,
    pub args: Vec<Arg>,
}

pub enum Arg {
    Pos(Expr),
    Named(Arc<str>, Expr),
}

pub enum Literal {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Arc<str>),
}

pub enum Expr {
    Literal(Literal),
    Var(Name),
    Attr(Box<Expr>, Arc<str>),
    Item(Box<(Expr, Expr)>),
    Slice(Box<(Expr, [Option<Expr>; 3])>),
    Not(Box<Expr>),
    Neg(Box<Expr>),
    And(Box<(Expr, Expr)>),
    Or(Box<(Expr, Expr)>),
    Binary(Binary, Box<(Expr, Expr)>),
    Compare(Box<Expr>, Vec<(Compare, Expr)>),
    If(Box<(Expr, Expr, Option<Expr>)>),
    Filter(Box<Expr>, Box<Apply>),
    Test(Box<Expr>, Test, Vec<Arg>),
    Call(Box<Expr>, Vec<Arg>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
}

#[derive(Clone, Copy)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

/// Reads a template. The error says what is not rendered, and where.
pub fn compile(source: &str) -> Result<Program, String> {
    if let Some(letter) = source
        .chars()
        .find(|letter| ('\x1c'..='\x1f').contains(letter))
    {
        return Err(format!(
            "the character {letter:?}, which only Python takes for a space"
        ));
    }
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    let syntax = syntax.build().map_err(|error| error.to_string())?;
    let (source, generates) = call_blocks(&source, &syntax)?;
    let tree = parse(&source, "template", syntax).map_err(|error| syntax_error(&error))?;
    let ast::Stmt::Template(template) = &tree else {
        return Err("no template".into());
    };
    let mut lower = Lower {
        frames: vec![Frame::default()],
        ..Lower::default()
    };
    let body = lower.body(&template.children)?;
    Ok(Program {
        body,
        names: lower.names,
        macros: lower.macros,
        generates,
        late: lower.late,
    })
}

fn syntax_error(error: &minijinja::Error) -> String {
    let line = error
        .line()
        .map_or(String::new(), |line| format!("line {line}: "));
    let what = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_string);
    format!("{line}{what}")
}

/// Writes `{% generation %}` as the call block that the extension of `transformers` makes of it,
/// and checks escapes, which the parser reads in another way than Python.
fn call_blocks(source: &str, syntax: &SyntaxConfig) -> Result<(String, bool), String> {
    if source.contains(GENERATION) {
        return Err(format!("the name {GENERATION}"));
    }
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    let mut is_tag = false;
    for token in tokenize(source, false, syntax.clone()) {
        let (token, span) = token.map_err(|error| syntax_error(&error))?;
        let range = span.start_offset as usize..span.end_offset as usize;
        let call = match token {
            Token::Ident("generation") if is_tag => "call __generation__()",
            Token::Ident("endgeneration") if is_tag => "endcall",
            Token::String(_) => {
                check_escapes(&source[range.clone()]).map_err(|what| at(span, what))?;
                ""
            }
            _ => "",
        };
        is_tag = matches!(token, Token::BlockStart);
        if !call.is_empty() {
            out.push_str(&source[copied..range.start]);
            out.push_str(call);
            copied = range.end;
        }
    }
    out.push_str(&source[copied..]);
    Ok((out, copied > 0))
}

fn check_escapes(quoted: &str) -> Result<(), String> {
    let mut letters = quoted.chars();
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            continue;
        }
        let rest = letters.as_str();
        match letters.next() {
            Some('u')
                if rest
                    .get(1..3)
                    .is_some_and(|high| ("d8".."e0").contains(&&*high.to_lowercase())) =>
            {
                return Err("half of a surrogate pair in a string".into());
            }
            Some(letter @ ('/' | 'a' | 'v' | 'U' | 'N' | '\n')) => {
                return Err(format!(
                    "the escape \\{} in a string",
                    letter.escape_default()
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

fn at(span: Span, what: impl std::fmt::Display) -> String {
    format!("line {}: {what}", span.start_line)
}

#[derive(Default)]
struct Lower {
    names: HashMap<Arc<str>, Name>,
    macros: Vec<Macro>,
    /// Whether the body of the current macro uses `caller`.
    calls_back: bool,
    /// The scope, and those around it.
    frames: Vec<Frame>,
    late: HashSet<Name>,
}

/// Names of a scope.
#[derive(Default)]
struct Frame {
    /// Read or set so far.
    known: HashSet<Name>,
    /// Read by scopes inside, when this one did not know them.
    read_inside: HashSet<Name>,
}

impl Lower {
    fn name(&mut self, name: &str) -> Name {
        let next = self.names.len() as Name;
        *self.names.entry(name.into()).or_insert(next)
    }

    fn reads(&mut self, name: Name) {
        let (last, outer) = self.frames.split_last_mut().expect("never empty");
        last.known.insert(name);
        for frame in outer
            .iter_mut()
            .filter(|frame| !frame.known.contains(&name))
        {
            frame.read_inside.insert(name);
        }
    }

    fn sets(&mut self, name: Name) {
        let frame = self.frames.last_mut().expect("never empty");
        if frame.known.insert(name) && frame.read_inside.contains(&name) {
            self.late.insert(name);
        }
    }

    /// Reads a part of the template that has a scope of its own.
    fn inside<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, String>,
    ) -> Result<T, String> {
        self.frames.push(Frame::default());
        let result = read(self);
        self.frames.pop();
        result
    }

    fn body(&mut self, body: &[ast::Stmt<'_>]) -> Result<Vec<Stmt>, String> {
        body.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    fn stmt(&mut self, stmt: &ast::Stmt<'_>) -> Result<Stmt, String> {
        Ok(match stmt {
            ast::Stmt::EmitRaw(raw) => Stmt::Text(raw.raw.into()),
            ast::Stmt::EmitExpr(emit) => Stmt::Emit(self.expr(&emit.expr)?),
            ast::Stmt::ForLoop(each) if each.recursive => {
                return Err(at(each.span(), "a recursive loop"));
            }
            ast::Stmt::ForLoop(each) => {
                let iter = self.expr(&each.iter)?;
                let (target, filter, body) = self.inside(|inner| {
                    let target = inner.target(&each.target)?;
                    let filter = inner.some(each.filter_expr.as_ref())?;
                    Ok((target, filter, inner.body(&each.body)?))
                })?;
                let otherwise = self.inside(|inner| inner.body(&each.else_body))?;
                Stmt::For(Box::new(For {
                    target,
                    iter,
                    filter,
                    body,
                    otherwise,
                }))
            }
            ast::Stmt::IfCond(cond) => Stmt::If(
                self.expr(&cond.expr)?,
                self.body(&cond.true_body)?,
                self.body(&cond.false_body)?,
            ),
            ast::Stmt::WithBlock(with) => {
                let values = with.assignments.iter().map(|(_, expr)| self.expr(expr));
                let values: Vec<Expr> = values.collect::<Result<_, _>>()?;
                self.inside(|inner| {
                    let targets = with
                        .assignments
                        .iter()
                        .map(|(target, _)| inner.target(target));
                    let targets: Vec<Target> = targets.collect::<Result<_, _>>()?;
                    let set = targets.into_iter().zip(values).collect();
                    Ok(Stmt::With(set, inner.body(&with.body)?))
                })?
            }
            ast::Stmt::Set(set) => {
                let value = self.expr(&set.expr)?;
                Stmt::Set(self.target(&set.target)?, value)
            }
            ast::Stmt::SetBlock(set) => {
                let filters = self.chain(set.filter.as_ref())?;
                let body = self.inside(|inner| inner.body(&set.body))?;
                Stmt::SetBlock(self.target(&set.target)?, filters, body)
            }
            ast::Stmt::FilterBlock(block) => {
                let filters = self.chain(Some(&block.filter))?;
                Stmt::FilterBlock(filters, self.inside(|inner| inner.body(&block.body))?)
            }
            ast::Stmt::Macro(decl) => {
                let name = self.name(decl.name);
                self.sets(name);
                Stmt::Macro(name, self.macro_of(decl)?)
            }
            ast::Stmt::CallBlock(call) => self.call_block(call)?,
            ast::Stmt::Continue(_) => Stmt::Continue,
            ast::Stmt::Break(_) => Stmt::Break,
            ast::Stmt::AutoEscape(block) => return Err(at(block.span(), "autoescape")),
            ast::Stmt::Do(block) => return Err(at(block.span(), "the tag `do`")),
            ast::Stmt::Template(block) => return Err(at(block.span(), "a template")),
        })
    }

    fn call_block(&mut self, block: &ast::CallBlock<'_>) -> Result<Stmt, String> {
        if let ast::Expr::Var(var) = &block.call.expr
            && var.id == GENERATION
        {
            let body = self.inside(|inner| inner.body(&block.macro_decl.body))?;
            return Ok(Stmt::Generation(body));
        }
        let callee = self.expr(&block.call.expr)?;
        let args = self.args(&block.call.args)?;
        let body = self.macro_of(&block.macro_decl)?;
        Ok(Stmt::Call(Expr::Call(Box::new(callee), args), body))
    }

    /// Reads a macro. Returns its number.
    fn macro_of(&mut self, decl: &ast::Macro<'_>) -> Result<usize, String> {
        let first_default = decl.args.len() - decl.defaults.len();
        let outer = std::mem::take(&mut self.calls_back);
        let (params, body) = self.inside(|inner| {
            let mut params = Vec::with_capacity(decl.args.len());
            for (number, arg) in decl.args.iter().enumerate() {
                let ast::Expr::Var(var) = arg else {
                    return Err(at(arg.span(), "a parameter that is no name"));
                };
                let name = inner.name(var.id);
                inner.sets(name);
                let default = number.checked_sub(first_default);
                let default = inner.some(default.map(|default| &decl.defaults[default]))?;
                params.push((name, var.id.into(), default));
            }
            Ok((params, inner.body(&decl.body)?))
        })?;
        let calls_back = std::mem::replace(&mut self.calls_back, outer);
        let caller = calls_back.then(|| self.name("caller"));
        self.macros.push(Macro {
            name: decl.name.into(),
            params,
            body,
            caller,
        });
        Ok(self.macros.len() - 1)
    }

    fn target(&mut self, target: &ast::Expr<'_>) -> Result<Target, String> {
        Ok(match target {
            ast::Expr::Var(var) => {
                let name = self.name(var.id);
                self.sets(name);
                Target::Name(name)
            }
            ast::Expr::List(list) => {
                let targets = list.items.iter().map(|item| self.target(item));
                Target::All(targets.collect::<Result<_, _>>()?)
            }
            ast::Expr::GetAttr(attr) => match &attr.expr {
                ast::Expr::Var(var) => {
                    let name = self.name(var.id);
                    self.reads(name);
                    Target::Attr(name, attr.name.into())
                }
                _ => return Err(at(attr.span(), "an attribute of an attribute is set")),
            },
            _ => {
                return Err(at(
                    target.span(),
                    format!("{} is set", target.description()),
                ));
            }
        })
    }

    /// The filters of a `set` or `filter` block, in their order.
    fn chain(&mut self, filter: Option<&ast::Expr<'_>>) -> Result<Vec<Apply>, String> {
        let mut chain = Vec::new();
        let mut next = filter;
        while let Some(ast::Expr::Filter(filter)) = next {
            chain.push(self.apply(filter)?);
            next = filter.expr.as_ref();
        }
        chain.reverse();
        Ok(chain)
    }

    fn apply(&mut self, filter: &ast::Spanned<ast::Filter<'_>>) -> Result<Apply, String> {
        let name = filter.name;
        let known = methods::filter(name);
        Ok(Apply {
            filter: known.ok_or_else(|| at(filter.span(), format!("the filter `{name}`")))?,
            args: self.args(&filter.args)?,
        })
    }

    fn args(&mut self, args: &[CallArg<'_>]) -> Result<Vec<Arg>, String> {
        let args = args.iter().map(|arg| match arg {
            CallArg::Pos(expr) => Ok(Arg::Pos(self.expr(expr)?)),
            CallArg::Kwarg(name, expr) => Ok(Arg::Named((*name).into(), self.expr(expr)?)),
            CallArg::PosSplat(expr) => Err(at(expr.span(), "arguments by *")),
            CallArg::KwargSplat(expr) => Err(at(expr.span(), "arguments by **")),
        });
        args.collect()
    }

    fn some(&mut self, expr: Option<&ast::Expr<'_>>) -> Result<Option<Expr>, String> {
        expr.map(|expr| self.expr(expr)).transpose()
    }

    fn both(
        &mut self,
        left: &ast::Expr<'_>,
        right: &ast::Expr<'_>,
    ) -> Result<Box<(Expr, Expr)>, String> {
        Ok(Box::new((self.expr(left)?, self.expr(right)?)))
    }

    fn all(&mut self, items: &[ast::Expr<'_>]) -> Result<Vec<Expr>, String> {
        items.iter().map(|item| self.expr(item)).collect()
    }

    fn expr(&mut self, expr: &ast::Expr<'_>) -> Result<Expr, String> {
        Ok(match expr {
            ast::Expr::Var(var) => self.var(var)?,
            ast::Expr::Const(value) => Expr::Literal(literal(value)?),
            ast::Expr::Slice(slice) => {
                let bounds = [&slice.start, &slice.stop, &slice.step];
                let [start, stop, step] = bounds.map(|bound| self.some(bound.as_ref()));
                Expr::Slice(Box::new((self.expr(&slice.expr)?, [start?, stop?, step?])))
            }
            ast::Expr::UnaryOp(op) => {
                let inner = Box::new(self.expr(&op.expr)?);
                match op.op {
                    UnaryOpKind::Not => Expr::Not(inner),
                    UnaryOpKind::Neg => Expr::Neg(inner),
                }
            }
            ast::Expr::BinOp(op) => self.binary(op)?,
            ast::Expr::Compare(chain) => {
                let first = self.expr(&chain.expr)?;
                let others = chain.ops.iter();
                let others = others.map(|next| Ok((compare(next.op), self.expr(&next.expr)?)));
                Expr::Compare(Box::new(first), others.collect::<Result<_, String>>()?)
            }
            ast::Expr::IfExpr(cond) => Expr::If(Box::new((
                self.expr(&cond.test_expr)?,
                self.expr(&cond.true_expr)?,
                self.some(cond.false_expr.as_ref())?,
            ))),
            ast::Expr::Filter(filter) => {
                let Some(inner) = &filter.expr else {
                    return Err(at(filter.span(), "a filter without a value"));
                };
                let inner = self.expr(inner)?;
                Expr::Filter(Box::new(inner), Box::new(self.apply(filter)?))
            }
            ast::Expr::Test(test) => {
                let name = test.name;
                let Some(known) = methods::test(name) else {
                    return Err(at(test.span(), format!("the test `{name}`")));
                };
                Expr::Test(
                    Box::new(self.expr(&test.expr)?),
                    known,
                    self.args(&test.args)?,
                )
            }
            ast::Expr::GetAttr(attr) => {
                self.check_attr(attr.name)
                    .map_err(|what| at(attr.span(), what))?;
                Expr::Attr(Box::new(self.expr(&attr.expr)?), attr.name.into())
            }
            ast::Expr::GetItem(item) => Expr::Item(self.both(&item.expr, &item.subscript_expr)?),
            ast::Expr::Call(call) => {
                if let ast::Expr::GetAttr(attr) = &call.expr
                    && methods::is_foreign(attr.name)
                {
                    return Err(at(call.span(), format!("the method `{}`", attr.name)));
                }
                Expr::Call(Box::new(self.expr(&call.expr)?), self.args(&call.args)?)
            }
            ast::Expr::List(list) => Expr::List(self.all(&list.items)?),
            ast::Expr::Tuple(tuple) => Expr::Tuple(self.all(&tuple.items)?),
            ast::Expr::Map(map) => {
                let members = map.keys.iter().zip(&map.values);
                let members = members.map(|(key, value)| Ok((self.expr(key)?, self.expr(value)?)));
                Expr::Dict(members.collect::<Result<_, String>>()?)
            }
        })
    }

    fn check_attr(&self, name: &str) -> Result<(), String> {
        match name.starts_with("__") {
            true => Err(format!("the attribute `{name}`")),
            false => Ok(()),
        }
    }

    fn var(&mut self, var: &ast::Spanned<ast::Var<'_>>) -> Result<Expr, String> {
        match var.id {
            "varargs" | "kwargs" | "self" | "super" | "lipsum" | "cycler" | "joiner" => {
                Err(at(var.span(), format!("the variable `{}`", var.id)))
            }
            name => {
                self.calls_back |= name == "caller";
                let name = self.name(name);
                self.reads(name);
                Ok(Expr::Var(name))
            }
        }
    }

    fn binary(&mut self, op: &ast::BinOp<'_>) -> Result<Expr, String> {
        let sides = self.both(&op.left, &op.right)?;
        let binary = match op.op {
            BinOpKind::ScAnd => return Ok(Expr::And(sides)),
            BinOpKind::ScOr => return Ok(Expr::Or(sides)),
            BinOpKind::Add => Binary::Add,
            BinOpKind::Sub => Binary::Sub,
            BinOpKind::Mul => Binary::Mul,
            BinOpKind::Div => Binary::Div,
            BinOpKind::FloorDiv => Binary::FloorDiv,
            BinOpKind::Rem => Binary::Rem,
            BinOpKind::Pow => Binary::Pow,
            BinOpKind::Concat => Binary::Concat,
            single => {
                let sign = match single {
                    BinOpKind::Ne => Compare::Ne,
                    BinOpKind::Lt => Compare::Lt,
                    BinOpKind::Lte => Compare::Le,
                    BinOpKind::Gt => Compare::Gt,
                    BinOpKind::Gte => Compare::Ge,
                    BinOpKind::In => Compare::In,
                    _ => Compare::Eq,
                };
                let (left, right) = *sides;
                return Ok(Expr::Compare(Box::new(left), vec![(sign, right)]));
            }
        };
        Ok(Expr::Binary(binary, sides))
    }
}

fn compare(op: CompareOpKind) -> Compare {
    match op {
        CompareOpKind::Eq => Compare::Eq,
        CompareOpKind::Ne => Compare::Ne,
        CompareOpKind::Lt => Compare::Lt,
        CompareOpKind::Lte => Compare::Le,
        CompareOpKind::Gt => Compare::Gt,
        CompareOpKind::Gte => Compare::Ge,
        CompareOpKind::In => Compare::In,
        CompareOpKind::NotIn => Compare::NotIn,
    }
}

fn literal(constant: &ast::Spanned<ast::Const>) -> Result<Literal, String> {
    let value = &constant.value;
    Ok(match value.kind() {
        ValueKind::None => Literal::None,
        ValueKind::Bool => Literal::Bool(value.is_true()),
        ValueKind::String => Literal::Str(value.as_str().unwrap_or_default().into()),
        ValueKind::Number if value.is_integer() => match value.as_i64() {
            Some(int) => Literal::Int(int),
            None => {
                return Err(at(
                    constant.span(),
                    format!("the integer {value}, over 64 bits"),
                ));
            }
        },
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(float) => Literal::Float(float),
            Err(_) => return Err(at(constant.span(), format!("the number {value}"))),
        },
        other => return Err(at(constant.span(), format!("a constant {other}"))),
    })
}
